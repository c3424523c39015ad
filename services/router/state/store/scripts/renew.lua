-- ARGV: worker id, session, lease ms, "1" if a report follows, report
-- Returns held, replaced or gone.
local key = worker_key(ARGV[1])
local owner = redis.call('HGET', key, 'session')
if not owner then return 'gone' end
if owner ~= ARGV[2] then return 'replaced' end
redis.call('ZADD', WORKERS, now_ms() + ARGV[3], ARGV[1])
if ARGV[4] == '1' then redis.call('HSET', key, 'report', ARGV[5]) end
return 'held'
