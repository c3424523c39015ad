"""What several engines share: downloads, streams of deltas, compilation of grammars, and the reasons of crashes."""
