-- ARGV: maximum to remove of each kind, feed limit, Unix ms that the caller expects ("": unknown), by how much it may be
-- wrong, lease in ms. If the clock has moved, by a correction or a fail-over to another host, every lease begins anew.
-- Returns {number of expired leases and reservations, Unix ms, by how much the clock has moved}.
local now, expected = now_ms(), tonumber(ARGV[3])
local moved = expected and now - expected or 0

-- Reservations keep the time that they had left, and their age; after a step back they may last longer.
local function renew_all()
  for _, key in ipairs({WORKERS, OWNERS}) do
    for _, id in ipairs(redis.call('ZRANGE', key, 0, -1)) do redis.call('ZADD', key, now + ARGV[5], id) end
  end
  local departed = redis.call('HGETALL', DEPARTED)
  for at = 1, #departed, 2 do
    local last = cmsgpack.unpack(departed[at + 1])
    last.u = now + ARGV[5]
    redis.call('HSET', DEPARTED, departed[at], cmsgpack.pack(last))
  end
  local ahead = math.max(moved, 0)
  local reservations = redis.call('HGETALL', RESERVATIONS)
  for at = 1, #reservations, 2 do
    local held = cmsgpack.unpack(reservations[at + 1])
    held.x, held.b = held.x + ahead, math.min(held.b + ahead, now)
    redis.call('HSET', RESERVATIONS, reservations[at], cmsgpack.pack(held))
    redis.call('ZADD', EXPIRIES, held.x, reservations[at])
  end
end

if math.abs(moved) > tonumber(ARGV[4]) then
  -- The sweeps of the other replicas notice it, too.
  if math.abs(now - tonumber(redis.call('GET', CLOCK) or 0)) > NOTICED_MS then
    redis.call('SET', CLOCK, now)
    renew_all()
    return {0, now, moved}
  end
end
local workers = redis.call('ZRANGEBYSCORE', WORKERS, '-inf', now, 'LIMIT', 0, ARGV[1])
for _, id in ipairs(workers) do
  local epoch = lose_worker(id, ARGV[5])
  if epoch then feed(ARGV[2], 'down', id, epoch) end
end
local departed = redis.call('HGETALL', DEPARTED)
for at = 1, #departed, 2 do
  if cmsgpack.unpack(departed[at + 1]).u <= now then
    redis.call('HDEL', DEPARTED, departed[at])
    unbook_worker(departed[at])
  end
end
local requests = redis.call('ZRANGEBYSCORE', EXPIRIES, '-inf', now, 'LIMIT', 0, ARGV[1])
for _, request in ipairs(requests) do
  local packed = redis.call('HGET', RESERVATIONS, request)
  if packed then unbook(request, packed) else redis.call('ZREM', EXPIRIES, request) end
end
return {#workers + #requests, now, 0}
