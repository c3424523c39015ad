-- ARGV: request id ("" books nothing), ttl ms, prefill scale, temperature, random number in [0, 1), offers, allowed
-- workers or "*", output, owner ("" for none), its lease ms, "1" when offers have limits, then 7 values an offer (worker,
-- slot, uncached, added, held, prefill and decode to book) and with limits 3 more (prefill, decode, requests from which
-- on the slot takes nothing), then the allowed workers.
-- Returns {slot, expires ms, 1 when it was booked before}; the slot is "" when all are at their limits.
local request, scale, temperature = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local offers, first, limited = tonumber(ARGV[6]), 12, ARGV[11] == '1'
local width = limited and 10 or 7

if request ~= '' then
  local packed = redis.call('HGET', RESERVATIONS, request)
  if packed then
    local held = cmsgpack.unpack(packed)
    local fits = ARGV[7] == '*'
    for at = first + offers * width, #ARGV do fits = fits or ARGV[at] == held.w end
    if held.x > now_ms() and fits then return {held.s, held.x, 1} end
    unbook(request, packed)
  end
end

local slots = {}
for offer = 0, offers - 1 do slots[#slots + 1] = ARGV[first + offer * width + 1] end
local prefills = redis.call('HMGET', PREFILL, unpack(slots))
local decodes = redis.call('HMGET', DECODE, unpack(slots))
local counts = limited and redis.call('HMGET', REQUESTS, unpack(slots))
local costs, starts, low, high = {}, {}, math.huge, -math.huge
for offer = 1, offers do
  local at = first + (offer - 1) * width
  local prefill = tonumber(prefills[offer] or 0) / 1000
  local decode = tonumber(decodes[offer] or 0) / 1000
  local busy = limited and (prefill >= tonumber(ARGV[at + 7]) or decode >= tonumber(ARGV[at + 8])
    or tonumber(counts[offer] or 0) >= tonumber(ARGV[at + 9]))
  if not busy then
    local cost = scale * math.max(prefill + tonumber(ARGV[at + 2]), 0) + decode + tonumber(ARGV[at + 3])
    costs[#costs + 1], starts[#starts + 1] = cost, at
    low, high = math.min(low, cost), math.max(high, cost)
  end
end
if #costs == 0 then return {'', 0, 0} end
offers = #costs

local chosen = 1
if temperature > 0 then
  local weights, total = {}, 0
  for offer = 1, offers do
    weights[offer] = high > low and math.exp(-(costs[offer] - low) / (high - low) / temperature) or 1
    total = total + weights[offer]
  end
  local left = tonumber(ARGV[5]) * total
  while chosen < offers and left >= weights[chosen] do
    left = left - weights[chosen]
    chosen = chosen + 1
  end
else
  local ties, fewest = {}, math.huge
  for offer = 1, offers do
    local held = tonumber(ARGV[starts[offer] + 4])
    if costs[offer] == low and held < fewest then ties, fewest = {}, held end
    if costs[offer] == low and held == fewest then ties[#ties + 1] = offer end
  end
  chosen = ties[1 + math.floor(tonumber(ARGV[5]) * #ties)]
end

local at = starts[chosen]
if request == '' then return {ARGV[at + 1], 0, 0} end
local expires = now_ms() + ARGV[2]
book(request, ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6]), expires,
  tonumber(ARGV[8]), ARGV[9], ARGV[10])
return {ARGV[at + 1], expires, 0}
