"""The front door: what bounds every JSON body of a foreign sender before anything is built from it."""
