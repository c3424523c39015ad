-- ARGV: worker id, session, "1" to keep its reservations, feed limit, ms for which they are kept otherwise in case that the
-- same process registers again.
-- Returns 1, or 0 if the session does not own the worker.
local id, key = ARGV[1], worker_key(ARGV[1])
local session, epoch, holder = unpack(redis.call('HMGET', key, 'session', 'epoch', 'holder'))
if session ~= ARGV[2] then return 0 end
local awaited = ARGV[3] ~= '1' and ARGV[5] ~= '0'
feed(ARGV[4], 'down', id, drop_worker(id, awaited or ARGV[3] == '1'))
if awaited then
  redis.call('HSET', DEPARTED, id, cmsgpack.pack({u = now_ms() + ARGV[5], e = epoch, h = holder or ''}))
end
return 1
