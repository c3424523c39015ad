-- ARGV: lifetime of a model's entry in seconds. The tag is the prefix. Returns the models registered within that time.
return redis.call('ZRANGEBYSCORE', base .. ':models', math.floor(now_ms() / 1000) - ARGV[1] + 1, '+inf')
