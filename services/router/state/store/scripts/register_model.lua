-- ARGV: model, lifetime of a model's entry in seconds. The tag is the prefix. Returns false.
local key = base .. ':models'
local now = math.floor(now_ms() / 1000)
redis.call('ZADD', key, now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', key, '-inf', now - ARGV[2])
return false
