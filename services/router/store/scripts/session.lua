-- ARGV: session id. Returns the slot its last request went to, or nothing.
return redis.call('GET', session_key(ARGV[1]))
