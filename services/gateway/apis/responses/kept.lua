-- Responses of one owner: values by id, when each was kept, and the bytes of all of them.
-- KEYS: values, times, bytes. ARGV: "keep" id value ttl_ms most most_bytes | "drop" id | "find" id ttl_ms
local values, times, bytes = KEYS[1], KEYS[2], KEYS[3]
local what, id = ARGV[1], ARGV[2]

local function forget(one)
  local size = redis.call('HSTRLEN', values, one)
  redis.call('ZREM', times, one)
  if redis.call('HDEL', values, one) == 0 then return 0 end
  redis.call('DECRBY', bytes, size)
  return 1
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

if what == 'drop' then return forget(id) end

if what == 'find' then
  local kept_at = redis.call('ZSCORE', times, id)
  if not kept_at or tonumber(kept_at) <= now_ms() - tonumber(ARGV[3]) then return false end
  return redis.call('HGET', values, id)
end

local value, ttl, most, most_bytes = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local now = now_ms()
forget(id)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', times, '-inf', now - ttl)) do forget(old) end
if redis.call('ZCARD', times) == 0 then redis.call('DEL', values, bytes) end
if #value > most_bytes or most == 0 then return 0 end
while redis.call('ZCARD', times) >= most or tonumber(redis.call('GET', bytes) or '0') + #value > most_bytes do
  forget(redis.call('ZRANGE', times, 0, 0)[1])
end
redis.call('HSET', values, id, value)
redis.call('ZADD', times, now, id)
redis.call('INCRBY', bytes, #value)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl) end
return 1
