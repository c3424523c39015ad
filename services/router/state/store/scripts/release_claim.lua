-- ARGV: worker id, session. The tag is the prefix. Returns 1, or 0 if the session does not hold the id.
local key = claim_key(ARGV[1])
if redis.call('HGET', key, 'session') ~= ARGV[2] then return 0 end
return redis.call('DEL', key)
