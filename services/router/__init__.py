"""Router: which worker should run this prompt."""
