-- ARGV: session id, slot of its last request, time to live in ms.
redis.call('SET', session_key(ARGV[1]), ARGV[2], 'PX', ARGV[3])
return 1
