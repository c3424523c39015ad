"""The live view: a page that shows what the suite is doing now, and the compact stream behind it."""
