"""Models, vocabularies, bodies and corpora that tests build."""
