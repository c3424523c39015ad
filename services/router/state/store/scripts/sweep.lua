-- ARGV: maximum to remove of each kind, feed limit. Returns the number of expired leases and reservations.
local now = now_ms()
local workers = redis.call('ZRANGEBYSCORE', WORKERS, '-inf', now, 'LIMIT', 0, ARGV[1])
for _, id in ipairs(workers) do
  local epoch = drop_worker(id, false)
  if epoch then feed(ARGV[2], 'down', id, epoch) end
end
local requests = redis.call('ZRANGEBYSCORE', EXPIRIES, '-inf', now, 'LIMIT', 0, ARGV[1])
for _, request in ipairs(requests) do
  local packed = redis.call('HGET', RESERVATIONS, request)
  if packed then unbook(request, packed) else redis.call('ZREM', EXPIRIES, request) end
end
return #workers + #requests
