"""Registration of workers: their streams of KV events, the load they report, and the guard against floods."""
