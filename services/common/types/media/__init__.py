"""Media items of prompts: images, audio and video, from the parts of a chat to the tokens that stand for them."""
