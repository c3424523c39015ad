-- ARGV: worker id, session, "1" to keep its reservations, feed limit
-- Returns 1, or 0 if the session does not own the worker.
if redis.call('HGET', worker_key(ARGV[1]), 'session') ~= ARGV[2] then return 0 end
feed(ARGV[4], 'down', ARGV[1], drop_worker(ARGV[1], ARGV[3] == '1'))
return 1
