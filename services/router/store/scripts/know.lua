-- ARGV: model, seconds a model stays known. The tag is the prefix. Returns nothing.
local key = base .. ':models'
local now = math.floor(now_ms() / 1000)
redis.call('ZADD', key, now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', key, '-inf', now - ARGV[2])
return false
