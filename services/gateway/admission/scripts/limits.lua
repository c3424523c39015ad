-- Decides atomically about one request of a key, by the clock of Redis.
-- KEYS[1]: hash with the content of both buckets (in thousandths) and the times of their last update (ms)
-- KEYS[2]: sorted set of running requests, by the expiry of their leases (ms)
-- ARGV: operation ("enter", "charge" or "settle"), requests per minute, tokens per minute, concurrency, request id,
--       tokens (to charge, or to refund), lease (ms)
local operation, request_id = ARGV[1], ARGV[5]
local rpm, tpm, concurrency = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local tokens, lease = tonumber(ARGV[6]), tonumber(ARGV[7])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function filled(name, limit)
  if limit == 0 then return 0 end
  local found = redis.call('HMGET', KEYS[1], name, name .. '_at')
  if not found[1] then return limit * 1000 end
  return math.min(tonumber(found[1]) + math.max(now - tonumber(found[2]), 0) * limit / 60, limit * 1000)
end

local requests, left = filled('requests', rpm), filled('tokens', tpm)
local refused, wait = '', 0

local function refuse(by, missing, limit)
  refused = by
  wait = limit > 0 and math.ceil(missing * 60 / limit) or 1000
end

if operation == 'enter' then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if concurrency > 0 and redis.call('ZCARD', KEYS[2]) >= concurrency then
    refuse('concurrency', 0, 0)
  elseif rpm > 0 and requests < 1000 then
    refuse('requests', 1000 - requests, rpm)
  elseif tpm > 0 and left < 1000 then
    refuse('tokens', 1000 - left, tpm)
  else
    requests = requests - 1000
    redis.call('ZADD', KEYS[2], now + lease, request_id)
  end
elseif operation == 'charge' then
  if tpm > 0 and left < tokens * 1000 then
    refuse('tokens', tokens * 1000 - left, tpm)
  else
    left = left - tokens * 1000
  end
else
  redis.call('ZREM', KEYS[2], request_id)
  left = math.min(left + tokens * 1000, tpm * 1000)
end

if rpm > 0 then redis.call('HSET', KEYS[1], 'requests', string.format('%.6f', requests), 'requests_at', now) end
if tpm > 0 then redis.call('HSET', KEYS[1], 'tokens', string.format('%.6f', left), 'tokens_at', now) end
-- A full bucket may expire; a debt may take longer than a minute to refill.
local debt = tpm > 0 and math.max(tpm * 1000 - left, 0) * 60 / tpm or 0
redis.call('PEXPIRE', KEYS[1], math.ceil(math.max(debt, 60000)) + 1000)
redis.call('PEXPIRE', KEYS[2], lease * 2)

local function state(value, limit)
  if limit == 0 then return 0, 0 end
  return math.max(math.floor(value / 1000), 0), math.ceil((limit * 1000 - value) * 60 / limit)
end
local requests_left, requests_reset = state(requests, rpm)
local tokens_left, tokens_reset = state(left, tpm)
return {refused, wait, requests_left, requests_reset, tokens_left, tokens_reset}
