-- ARGV: generation to set if there is none, because the keys are new or were lost.
-- Returns {number of the last change, its entry id, {id, epoch, card, draining} of each worker, generation}.
redis.call('SET', base .. ':generation', ARGV[1], 'NX')
local last = redis.call('XREVRANGE', CHANGES, '+', '-', 'COUNT', 1)
local workers = {}
for _, id in ipairs(redis.call('ZRANGE', WORKERS, 0, -1)) do
  local known = redis.call('HMGET', worker_key(id), 'epoch', 'card', 'draining')
  if known[1] then workers[#workers + 1] = {id, known[1], known[2], known[3]} end
end
local number = tonumber(redis.call('GET', base .. ':changed') or 0)
return {number, last[1] and last[1][1] or '0-0', workers, redis.call('GET', base .. ':generation')}
