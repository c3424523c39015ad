-- ARGV: worker id, session, "1" to keep its reservations, feed limit, ms for which they are kept otherwise in case that the
-- same process registers again.
-- Returns 1, or 0 if the session does not own the worker.
local id = ARGV[1]
if redis.call('HGET', worker_key(id), 'session') ~= ARGV[2] then return 0 end
local lost = ARGV[3] ~= '1' and ARGV[5] ~= '0'
feed(ARGV[4], 'down', id, lost and lose_worker(id, ARGV[5]) or drop_worker(id, ARGV[3] == '1'))
return 1
