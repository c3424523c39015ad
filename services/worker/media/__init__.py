"""Media files of prompts: received in parts, checked, and kept within a bound."""
