-- Files and batches of all tenants, in one slot of a cluster, so that a script sees what all of them use.
-- KEYS[1]: first part of every key. ARGV: action, tenant, limits (files, bytes and batches of a tenant, bytes of all),
-- seconds for which ended batches are kept, then the arguments of the action.
-- usage: tenant -> bytes charged, "*" -> those of all. expiry: what expires -> when. turns: tenant -> number of its last turn.
-- of a tenant: files: id -> record; sizes: id -> bytes charged; uploads: ids; list: batch ids by creation;
--   open: batch id -> end of its lease.
-- data: content of a file; batch: record, status, epoch, held, lost, charged, completed, failed; done: a bit a line.
local base, action, owner = KEYS[1], ARGV[1], ARGV[2]
local max_files, max_bytes, max_batches, max_total = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]),
  tonumber(ARGV[6])
local kept = tonumber(ARGV[7])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local usage, expiry, turns = base .. ':usage', base .. ':expiry', base .. ':turns'
local SWEPT, SPARE_S, WINDOW_S = 64, 3600, 86400

local function key(kind, tenant, id) return base .. ':' .. kind .. ':' .. tenant .. (id and ':' .. id or '') end

local function used(tenant) return tonumber(redis.call('HGET', usage, tenant) or '0') end

local function charge(tenant, amount)
  for _, name in ipairs({tenant, '*'}) do
    if redis.call('HINCRBY', usage, name, string.format('%d', amount)) == 0 then redis.call('HDEL', usage, name) end
  end
end

-- Returns why an amount does not fit; nil if it does.
local function excess(tenant, amount)
  if used(tenant) + amount > max_bytes then return 'tenant' end
  if used('*') + amount > max_total then return 'total' end
end

local function drop_file(tenant, id)
  local size = redis.call('HGET', key('sizes', tenant), id)
  if not size then return 0 end
  charge(tenant, -tonumber(size))
  redis.call('HDEL', key('sizes', tenant), id)
  redis.call('SREM', key('uploads', tenant), id)
  redis.call('ZREM', expiry, 'file\n' .. tenant .. '\n' .. id)
  redis.call('UNLINK', key('data', tenant, id))
  redis.call('HDEL', key('files', tenant), id)
  return 1
end

local function results(id)
  local name = 'file-' .. string.gsub(id, '^batch_', '')
  return name .. '-output', name .. '-error'
end

local function drop_batch(tenant, id)
  local batch = key('batch', tenant, id)
  local charged = redis.call('HGET', batch, 'charged')
  local output, errors = results(id)
  drop_file(tenant, output)
  drop_file(tenant, errors)
  if charged then charge(tenant, -tonumber(charged)) end
  redis.call('DEL', batch, key('done', tenant, id))
  redis.call('ZREM', key('list', tenant), id)
  redis.call('ZREM', key('open', tenant), id)
  redis.call('ZREM', expiry, 'batch\n' .. tenant .. '\n' .. id)
end

-- Removes what is beyond its time, some of it at a time. Keys also expire by themselves, later, should no gateway be left.
local function sweep()
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', expiry, '-inf', now, 'LIMIT', 0, SWEPT)) do
    local kind, tenant, id = string.match(name, '^(%a+)\n(.*)\n([^\n]*)$')
    if kind == 'file' then drop_file(tenant, id) else drop_batch(tenant, id) end
    redis.call('ZREM', expiry, name)
  end
end

-- Returns the key of a batch whose claim is valid.
local function claimed(id, epoch)
  local batch = key('batch', owner, id)
  local lease = redis.call('ZSCORE', key('open', owner), id)
  if redis.call('HGET', batch, 'epoch') == epoch and lease and tonumber(lease) > now then return batch end
end

local function is_open(status)
  return status == 'validating' or status == 'in_progress' or status == 'finalizing' or status == 'cancelling'
end

if action == 'claim' then
  local lease, passed_over = tonumber(ARGV[8]), {}
  for at = 9, #ARGV do passed_over[ARGV[at]] = true end
  sweep()
  for _, tenant in ipairs(redis.call('ZRANGE', turns, 0, -1)) do
    local open = key('open', tenant)
    local id = redis.call('ZRANGEBYSCORE', open, '-inf', now, 'LIMIT', 0, 1)[1]
    if redis.call('EXISTS', open) == 0 then
      redis.call('ZREM', turns, tenant)
    elseif id and not passed_over[tenant] then
      local batch = key('batch', tenant, id)
      local last = redis.call('ZRANGE', turns, -1, -1, 'WITHSCORES')
      redis.call('ZADD', turns, tonumber(last[2]) + 1, tenant)
      redis.call('ZADD', open, now + lease, id)
      local lost = redis.call('HINCRBY', batch, 'lost', redis.call('HGET', batch, 'held') or '0')
      redis.call('HSET', batch, 'held', 1)
      return {tenant, id, redis.call('HINCRBY', batch, 'epoch', 1), lost}
    end
  end
  return false
end

if action == 'add_file' then
  local id, record, content, charged, expires_at = ARGV[8], ARGV[9], ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12])
  sweep()
  if redis.call('SCARD', key('uploads', owner)) >= max_files then return 'files' end
  local reason = excess(owner, charged)
  if reason then return reason end
  charge(owner, charged)
  redis.call('HSET', key('files', owner), id, record)
  redis.call('HSET', key('sizes', owner), id, charged)
  redis.call('SADD', key('uploads', owner), id)
  redis.call('SET', key('data', owner, id), content, 'EX', math.ceil(math.max(expires_at - now, 0)) + SPARE_S)
  redis.call('ZADD', expiry, expires_at, 'file\n' .. owner .. '\n' .. id)
  return 'stored'
elseif action == 'read' then
  if redis.call('HEXISTS', key('files', owner), ARGV[8]) == 0 then return false end
  return redis.call('GETRANGE', key('data', owner, ARGV[8]), ARGV[9], ARGV[10])
elseif action == 'remove_file' then
  if redis.call('HEXISTS', key('files', owner), ARGV[8]) == 0 then return 0 end
  return drop_file(owner, ARGV[8])
elseif action == 'add_batch' then
  local id, record, created_at, charged, seconds = ARGV[8], ARGV[9], ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12])
  sweep()
  if redis.call('ZCARD', key('list', owner)) >= max_batches then return 'batches' end
  local reason = excess(owner, charged)
  if reason then return reason end
  charge(owner, charged)
  redis.call('ZADD', key('list', owner), created_at, id)
  redis.call('ZADD', key('open', owner), 0, id)
  redis.call('ZADD', turns, 'NX', 0, owner)
  redis.call('ZADD', expiry, now + seconds, 'batch\n' .. owner .. '\n' .. id)
  redis.call('HSET', key('batch', owner, id), 'record', record, 'status', 'validating', 'epoch', 0, 'held', 0,
    'lost', 0, 'charged', charged, 'completed', 0, 'failed', 0)
  redis.call('EXPIRE', key('batch', owner, id), math.ceil(seconds) + SPARE_S)
  return 'stored'
elseif action == 'batches' then
  local found = {}
  for _, id in ipairs(redis.call('ZRANGE', key('list', owner), 0, -1)) do
    found[#found + 1] = redis.call('HMGET', key('batch', owner, id), 'record', 'completed', 'failed')
  end
  return found
elseif action == 'remove_batch' then
  local status = redis.call('HGET', key('batch', owner, ARGV[8]), 'status')
  if not status or is_open(status) then return 0 end
  drop_batch(owner, ARGV[8])
  return 1
elseif action == 'cancel' then
  local batch = key('batch', owner, ARGV[8])
  local status = redis.call('HGET', batch, 'status')
  if status ~= 'validating' and status ~= 'in_progress' then return 0 end
  redis.call('HSET', batch, 'record', ARGV[9], 'status', 'cancelling')
  return 1
elseif action == 'used' then
  sweep()
  return {used(owner), used('*')}
end

local id = ARGV[8]
local batch = claimed(id, ARGV[9])
if not batch then return false end
if action == 'renew' then
  local lease = tonumber(ARGV[10])
  redis.call('ZADD', key('open', owner), now + lease, id)
  redis.call('HSET', batch, 'held', lease > 0 and 1 or 0)
  return redis.call('HGET', batch, 'status')
elseif action == 'record' then
  local line, succeeded, size = ARGV[10], ARGV[11] == '1', tonumber(ARGV[12])
  local done, output, errors = key('done', owner, id), results(id)
  if redis.call('GETBIT', done, line) == 1 then return false end
  local reason = excess(owner, size)
  if reason then return reason end
  charge(owner, size)
  local file = succeeded and output or errors
  redis.call('SETBIT', done, line, 1)
  for at = 13, #ARGV do redis.call('APPEND', key('data', owner, file), ARGV[at]) end
  for _, name in ipairs({done, key('data', owner, file)}) do
    redis.call('EXPIRE', name, WINDOW_S + 2 * math.ceil(kept) + SPARE_S)
  end
  redis.call('HINCRBY', key('sizes', owner), file, size)
  redis.call('HINCRBY', batch, succeeded and 'completed' or 'failed', 1)
  redis.call('HSET', batch, 'lost', 0)
  return 'stored'
elseif action == 'done' then
  return redis.call('GET', key('done', owner, id)) or ''
elseif action == 'result_sizes' then
  local output, errors = results(id)
  return {redis.call('STRLEN', key('data', owner, output)), redis.call('STRLEN', key('data', owner, errors))}
elseif action == 'save' then
  local record, status = ARGV[10], ARGV[11]
  if status == 'in_progress' and redis.call('HGET', batch, 'status') == 'cancelling' then return false end
  redis.call('HSET', batch, 'record', record, 'status', status)
  for at = 12, #ARGV, 2 do redis.call('HSET', key('files', owner), ARGV[at], ARGV[at + 1]) end
  if not is_open(status) then
    redis.call('ZREM', key('open', owner), id)
    redis.call('EXPIRE', batch, math.ceil(kept) + SPARE_S)
    redis.call('ZADD', expiry, now + kept, 'batch\n' .. owner .. '\n' .. id)
  end
  return 'stored'
end
return redis.error_reply('unknown operation')
