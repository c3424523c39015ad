"""Media items of chats: fetching, checking and counting."""
