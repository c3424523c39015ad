-- Files and batches of one tenant. KEYS: files, sizes, data, list, batch, results. ARGV[1] names the operation.
-- files: id -> record; sizes: id -> bytes; data: content of one file; list: batch ids by creation;
-- batch: record, status, epoch, lease, completed, failed; results: line -> flag and text.
local files, sizes, data, list, batch, results = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local action = ARGV[1]
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6

local function claimed(epoch)
  local held = redis.call('HMGET', batch, 'epoch', 'lease')
  return held[1] == epoch and tonumber(held[2]) > now
end

local function keep(id, record, content_key, content, seconds)
  redis.call('HSET', files, id, record)
  redis.call('HSET', sizes, id, #content)
  redis.call('SET', content_key, content, 'EX', seconds)
end

if action == 'add_file' then
  local id, record, content, seconds, most, most_bytes = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local total = #content
  for _, size in ipairs(redis.call('HVALS', sizes)) do total = total + tonumber(size) end
  if redis.call('HLEN', files) >= tonumber(most) or total > tonumber(most_bytes) then return 0 end
  keep(id, record, data, content, seconds)
  return 1
elseif action == 'remove_file' then
  redis.call('HDEL', sizes, ARGV[2])
  redis.call('DEL', data)
  return redis.call('HDEL', files, ARGV[2])
elseif action == 'add_batch' then
  if redis.call('ZCARD', list) >= tonumber(ARGV[4]) then return 0 end
  redis.call('ZADD', list, ARGV[5], ARGV[2])
  redis.call('HSET', batch, 'record', ARGV[3], 'status', 'validating', 'epoch', '0', 'lease', '0', 'completed', 0,
    'failed', 0)
  return 1
elseif action == 'claim' then
  local held = redis.call('HMGET', batch, 'status', 'lease')
  if not held[1] then return -1 end
  if tonumber(held[2]) > now then return 0 end
  if held[1] ~= 'validating' and held[1] ~= 'in_progress' and held[1] ~= 'finalizing' and held[1] ~= 'cancelling' then
    return -1
  end
  redis.call('HSET', batch, 'lease', tostring(now + tonumber(ARGV[2])))
  return redis.call('HINCRBY', batch, 'epoch', 1)
elseif action == 'renew' then
  if not claimed(ARGV[2]) then return 0 end
  redis.call('HSET', batch, 'lease', tostring(now + tonumber(ARGV[3])))
  return 1
elseif action == 'record' then
  if not claimed(ARGV[2]) or redis.call('HSETNX', results, ARGV[3], ARGV[4] .. ARGV[5]) == 0 then return 0 end
  redis.call('HINCRBY', batch, ARGV[4] == '1' and 'completed' or 'failed', 1)
  return 1
elseif action == 'save' then
  if not claimed(ARGV[2]) then return 0 end
  if redis.call('HGET', batch, 'status') == 'cancelling' and ARGV[4] == 'in_progress' then return 0 end
  redis.call('HSET', batch, 'record', ARGV[3], 'status', ARGV[4])
  for at = 5, #ARGV, 5 do keep(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]) end
  return 1
elseif action == 'cancel' then
  local status = redis.call('HGET', batch, 'status')
  if status ~= 'validating' and status ~= 'in_progress' then return 0 end
  redis.call('HSET', batch, 'record', ARGV[2], 'status', 'cancelling')
  return 1
end
return redis.error_reply('unknown operation')
