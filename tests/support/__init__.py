"""What tests share, by kind."""
