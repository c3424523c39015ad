-- ARGV: worker id, session, feed limit. Returns 1, or 0 if the session does not own the worker.
local key = worker_key(ARGV[1])
local known = redis.call('HMGET', key, 'session', 'draining', 'epoch')
if known[1] ~= ARGV[2] then return 0 end
if known[2] ~= '1' then
  redis.call('HSET', key, 'draining', '1')
  feed(ARGV[3], 'draining', ARGV[1], known[3])
end
return 1
