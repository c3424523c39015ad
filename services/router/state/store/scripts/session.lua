-- ARGV: session id. Returns the slot of its last request, or nil.
return redis.call('GET', session_key(ARGV[1]))
