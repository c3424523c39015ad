-- Prefix of every script. KEYS[1] is the model's hash tag, "{prefix:model}". Every key of a model starts with it, so all
-- of them are in one hash slot and scripts may derive them. docs/redis.md lists the keys.
local base = KEYS[1]
local WORKERS = base .. ':workers'
local CHANGES = base .. ':changes'
local PREFILL = base .. ':prefill'
local DECODE = base .. ':decode'
local REQUESTS = base .. ':requests'
local RESERVATIONS = base .. ':reservations'
local EXPIRIES = base .. ':expiries'
local ENDED = base .. ':ended'
local OWNERS = base .. ':owners'
local QUEUES = base .. ':queues'
local CLOCK = base .. ':clock'
local DEPARTED = base .. ':departed'
local OP_HEADER = 6
local ENDED_FOR_MS = 30000 -- as in store/base.py
local MAX_ENDED = 50000
local NOTICED_MS = 60000 -- a move of the clock is noticed once by all replicas
local LONGER_MS = 1000 -- as in reservations/table.py
local CHUNK = 4000 -- Lua's stack limits the number of arguments of a call

local moment -- of this run, once asked for

local function now_ms()
  if not moment then
    local time = redis.call('TIME')
    moment = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return moment
end

local function claim_key(id) return base .. ':claim:' .. id end
local function worker_key(id) return base .. ':worker:' .. id end
local function booked_key(id) return base .. ':booked:' .. id end
local function owned_key(owner) return base .. ':owned:' .. owner end
local function session_key(id) return base .. ':session:' .. id end
local function blocks_key(id, epoch, rank, tier)
  return base .. ':blocks:' .. id .. ':' .. epoch .. ':' .. rank .. ':' .. tier
end

-- Returns the number of queues of other replicas, and whether the first request of any precedes this request.
-- Of equal ones, a request that has waited LONGER_MS longer precedes.
local function count_queues(replica, priority, deadline, waited)
  local queues, now, count, precedes = redis.call('HGETALL', QUEUES), now_ms(), 0, false
  for at = 1, #queues, 2 do
    local until_ms, first, due = struct.unpack('<ddd', queues[at + 1])
    local since = #queues[at + 1] < 32 and now or struct.unpack('<d', queues[at + 1], 25) -- as older versions write it
    if queues[at] ~= replica then
      if until_ms < now then
        redis.call('HDEL', QUEUES, queues[at])
      else
        count = count + 1
        precedes = precedes or first < priority or (first == priority and due < deadline)
          or (first == priority and due == deadline and since + LONGER_MS < now - waited)
      end
    end
  end
  return count, precedes
end

local function is_preceded(replica, priority, deadline, waited)
  if redis.call('EXISTS', QUEUES) == 0 then return false end
  local _, precedes = count_queues(replica, priority, deadline, waited)
  return precedes
end

-- Appends a change. n numbers changes consecutively, so that followers detect missed ones.
local function feed(limit, kind, id, epoch, ...)
  local n = redis.call('INCR', base .. ':changed')
  redis.call('XADD', CHANGES, 'MAXLEN', '~', limit, '*', 'n', n, 'k', kind, 'w', id, 'e', epoch, ...)
end

local function unlink_rank(id, epoch, rank)
  redis.call('UNLINK', blocks_key(id, epoch, rank, 0), blocks_key(id, epoch, rank, 1), blocks_key(id, epoch, rank, 2))
end

local function unbook(request, packed)
  local held = cmsgpack.unpack(packed)
  redis.call('HDEL', RESERVATIONS, request)
  redis.call('ZREM', EXPIRIES, request)
  redis.call('SREM', booked_key(held.w), request)
  if held.o then redis.call('SREM', owned_key(held.o), request) end
  if redis.call('HINCRBY', REQUESTS, held.s, -1) <= 0 then
    redis.call('HDEL', REQUESTS, held.s)
    redis.call('HDEL', PREFILL, held.s)
    redis.call('HDEL', DECODE, held.s)
  else -- 0 - x, because Lua's -0 is not an integer to Redis
    redis.call('HINCRBY', PREFILL, held.s, 0 - held.p)
    redis.call('HINCRBY', DECODE, held.s, 0 - held.d)
  end
end

local function book(request, worker, slot, prefill, decode, expires, output, owner, owner_lease_ms)
  local held = {w = worker, s = slot, p = prefill, d = decode, x = expires, u = output, b = now_ms()}
  if owner ~= '' then
    held.o = owner
    redis.call('SADD', owned_key(owner), request)
    redis.call('ZADD', OWNERS, 'GT', now_ms() + owner_lease_ms, owner)
  end
  redis.call('HSET', RESERVATIONS, request, cmsgpack.pack(held))
  redis.call('ZADD', EXPIRIES, expires, request)
  redis.call('SADD', booked_key(worker), request)
  redis.call('HINCRBY', REQUESTS, slot, 1)
  redis.call('HINCRBY', PREFILL, slot, prefill)
  redis.call('HINCRBY', DECODE, slot, decode)
end

local function unbook_worker(id)
  for _, request in ipairs(redis.call('SMEMBERS', booked_key(id))) do
    local packed = redis.call('HGET', RESERVATIONS, request)
    if packed then unbook(request, packed) end
  end
  redis.call('DEL', booked_key(id))
end

local function drop_worker(id, keep_reservations)
  local key = worker_key(id)
  local epoch = redis.call('HGET', key, 'epoch')
  if epoch then
    for rank = 0, tonumber(redis.call('HGET', key, 'ranks')) - 1 do unlink_rank(id, epoch, rank) end
  end
  redis.call('UNLINK', key)
  redis.call('ZREM', WORKERS, id)
  if not keep_reservations then unbook_worker(id) end
  return epoch
end

-- Removes a worker whose connection or lease was lost, and keeps its reservations for some ms, in case that the same
-- process registers again. Returns its epoch.
local function lose_worker(id, ms)
  local epoch, holder = unpack(redis.call('HMGET', worker_key(id), 'epoch', 'holder'))
  drop_worker(id, epoch)
  if epoch then redis.call('HSET', DEPARTED, id, cmsgpack.pack({u = now_ms() + ms, e = epoch, h = holder or ''})) end
  return epoch
end

-- Adds or removes the 8-byte hashes of blob[from, to] in chunks.
local function change_set(command, key, blob, from, to)
  while from <= to do
    local stop = math.min(from + CHUNK * 8 - 1, to)
    local members = {}
    for at = from, stop, 8 do members[#members + 1] = string.sub(blob, at, at + 7) end
    redis.call(command, key, unpack(members))
    from = stop + 1
  end
end

-- Applies encoded operations to a rank's sets; returns false if a tier exceeds the capacity.
local function apply_ops(id, epoch, rank, blob, capacity)
  local at = 1
  while at <= #blob do
    local kind, tier, count = struct.unpack('<BBI4', blob, at)
    local from = at + OP_HEADER
    at = from + count * 8
    if kind == 2 then
      unlink_rank(id, epoch, rank)
    else
      local key = blocks_key(id, epoch, rank, tier)
      change_set(kind == 0 and 'SADD' or 'SREM', key, blob, from, at - 1)
      if kind == 0 and redis.call('SCARD', key) > capacity then return false end
    end
  end
  return true
end
