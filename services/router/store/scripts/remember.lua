-- ARGV: session id, slot its last request went to, how long to remember it, ms.
redis.call('SET', session_key(ARGV[1]), ARGV[2], 'PX', ARGV[3])
return 1
