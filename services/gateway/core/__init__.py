"""The gateway's domain types, which import nothing of the gateway above them."""
