-- ARGV: most to clear of each kind, feed limit. Returns how many workers and reservations were cleared.
local now, most = now_ms(), tonumber(ARGV[1])

local function clear(requests)
  for _, request in ipairs(requests) do
    local packed = redis.call('HGET', RESERVATIONS, request)
    if packed then unbook(request, packed) else redis.call('ZREM', EXPIRIES, request) end
  end
  return #requests
end

local workers = redis.call('ZRANGEBYSCORE', WORKERS, '-inf', now, 'LIMIT', 0, most)
for _, id in ipairs(workers) do
  local epoch = drop_worker(id, false)
  if epoch then feed(ARGV[2], 'down', id, epoch) end
end
local cleared = #workers + clear(redis.call('ZRANGEBYSCORE', EXPIRIES, '-inf', now, 'LIMIT', 0, most))
-- An owner with more than is left of the bound keeps its place, and the next sweep goes on.
local left = most
for _, owner in ipairs(redis.call('ZRANGEBYSCORE', OWNERS, '-inf', now, 'LIMIT', 0, most)) do
  if left > 0 then
    local found = clear(redis.call('SRANDMEMBER', owned_key(owner), left))
    left, cleared = left - found, cleared + found
    if redis.call('SCARD', owned_key(owner)) == 0 then redis.call('ZREM', OWNERS, owner) end
  end
end
return cleared
