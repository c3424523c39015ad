-- Stored responses and conversations of all owners, in one slot of a cluster, so that a script sees what all of them use.
-- KEYS[1]: first part of every key.
-- values:OWNER: id -> value; times:OWNER: id -> time stored. times: OWNER\nid -> time stored; sizes: OWNER\nid -> bytes;
-- bytes, counts: owner -> bytes, responses; total: bytes of all.
-- ARGV: owner, then "put" id value bytes ttl_ms, most responses and bytes of an owner, of all, expected
--   | "delete" id | "find" id ttl_ms | "age" id | "used"
-- bytes: -1 for a value that may not be stored. expected: SHA-1 of the value to replace; "none": only if there is none;
-- empty: any.
local base, owner, operation, id = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local all, sizes, bytes, counts, total = base .. ':times', base .. ':sizes', base .. ':bytes', base .. ':counts',
  base .. ':total'
local SWEPT, SPARE_MS = 256, 3600000

local function values(name) return base .. ':values:' .. name end
local function times(name) return base .. ':times:' .. name end

local function delete(name, response_id)
  local member = name .. '\n' .. response_id
  local size = redis.call('HGET', sizes, member)
  if not size then return 0 end
  redis.call('HDEL', sizes, member)
  redis.call('ZREM', all, member)
  redis.call('ZREM', times(name), response_id)
  redis.call('HDEL', values(name), response_id)
  redis.call('DECRBY', total, size)
  redis.call('ZINCRBY', bytes, -size, name)
  if tonumber(redis.call('ZINCRBY', counts, -1, name)) <= 0 then
    redis.call('ZREM', counts, name)
    redis.call('ZREM', bytes, name)
  end
  return 1
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

if operation == 'delete' then return delete(owner, id) end
if operation == 'used' then
  return {tonumber(redis.call('ZSCORE', bytes, owner) or '0'), tonumber(redis.call('GET', total) or '0')}
end

local function find(ttl_ms)
  local stored_at = redis.call('ZSCORE', times(owner), id)
  if not stored_at or tonumber(stored_at) <= now_ms() - ttl_ms then return false end
  return redis.call('HGET', values(owner), id)
end

if operation == 'find' then return find(tonumber(ARGV[4])) end

if operation == 'age' then
  local stored_at = redis.call('ZSCORE', times(owner), id)
  return stored_at and now_ms() - stored_at
end

local value, size, ttl = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local owner_responses, owner_bytes, max_responses, max_bytes = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]),
  tonumber(ARGV[10])
if ARGV[11] ~= '' then
  local current = find(ttl)
  local digest = current and redis.sha1hex(current) or 'none'
  if digest ~= ARGV[11] then return 0 end
end
local now = now_ms()
delete(owner, id)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', all, '-inf', now - ttl, 'LIMIT', 0, SWEPT)) do
  delete(string.match(member, '^(.*)\n(.*)$'))
end
if size < 0 then return 0 end

local function oldest(name) return redis.call('ZRANGE', times(name), 0, 0)[1] end

local function of_owner(key) return tonumber(redis.call('ZSCORE', key, owner) or '0') end

while of_owner(counts) >= owner_responses or of_owner(bytes) + size > owner_bytes do
  delete(owner, oldest(owner))
end
-- Of all owners, the one with most loses its oldest.
while true do
  local too_many = redis.call('ZCARD', all) >= max_responses
  if not too_many and tonumber(redis.call('GET', total) or '0') + size <= max_bytes then break end
  local name = redis.call('ZREVRANGE', too_many and counts or bytes, 0, 0)[1]
  local first = name and oldest(name)
  if not first then break end
  delete(name, first)
end
local member = owner .. '\n' .. id
redis.call('HSET', values(owner), id, value)
redis.call('ZADD', times(owner), now, id)
redis.call('ZADD', all, now, member)
redis.call('HSET', sizes, member, size)
redis.call('ZINCRBY', bytes, size, owner)
redis.call('ZINCRBY', counts, 1, owner)
redis.call('INCRBY', total, size)
for _, key in ipairs({values(owner), times(owner), all, sizes, bytes, counts, total}) do
  redis.call('PEXPIRE', key, ttl + SPARE_MS)
end
return 1
