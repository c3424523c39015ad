-- Stored responses of one owner: values by id, the time each was stored, and their total size in bytes.
-- KEYS: values, times, bytes.
-- ARGV: "put" id value ttl_ms max_responses max_bytes expected | "delete" id | "find" id ttl_ms
-- expected: SHA-1 of the value to replace; "none": only if there is none; empty: any.
local values, times, bytes = KEYS[1], KEYS[2], KEYS[3]
local operation, id = ARGV[1], ARGV[2]

local function delete(response_id)
  local size = redis.call('HSTRLEN', values, response_id)
  redis.call('ZREM', times, response_id)
  if redis.call('HDEL', values, response_id) == 0 then return 0 end
  redis.call('DECRBY', bytes, size)
  return 1
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

if operation == 'delete' then return delete(id) end

local function find(ttl_ms)
  local stored_at = redis.call('ZSCORE', times, id)
  if not stored_at or tonumber(stored_at) <= now_ms() - ttl_ms then return false end
  return redis.call('HGET', values, id)
end

if operation == 'find' then return find(tonumber(ARGV[3])) end

local value, ttl, max_responses, max_bytes = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if ARGV[7] ~= '' then
  local current = find(ttl)
  local digest = current and redis.sha1hex(current) or 'none'
  if digest ~= ARGV[7] then return 0 end
end
local now = now_ms()
delete(id)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', times, '-inf', now - ttl)) do delete(old) end
if redis.call('ZCARD', times) == 0 then redis.call('DEL', values, bytes) end
if #value > max_bytes or max_responses == 0 then return 0 end
while redis.call('ZCARD', times) >= max_responses or tonumber(redis.call('GET', bytes) or '0') + #value > max_bytes do
  delete(redis.call('ZRANGE', times, 0, 0)[1])
end
redis.call('HSET', values, id, value)
redis.call('ZADD', times, now, id)
redis.call('INCRBY', bytes, #value)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl) end
return 1
