-- ARGV: request id ("" books nothing), ttl ms, prefill scale, temperature, random number in [0, 1), offers, allowed
-- workers or "*", output, owner ("" for none), its lease ms, then 7 values an offer (worker, slot, uncached, added,
-- held, prefill and decode to book), then the allowed workers. Returns {slot, expires ms, 1 when it was booked before}.
local request, scale, temperature = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local offers, first, width = tonumber(ARGV[6]), 11, 7

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
local costs, low, high = {}, math.huge, -math.huge
for offer = 1, offers do
  local at = first + (offer - 1) * width
  local prefill = tonumber(prefills[offer] or 0) / 1000 + tonumber(ARGV[at + 2])
  local decode = tonumber(decodes[offer] or 0) / 1000 + tonumber(ARGV[at + 3])
  costs[offer] = scale * math.max(prefill, 0) + decode
  low, high = math.min(low, costs[offer]), math.max(high, costs[offer])
end

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
    local held = tonumber(ARGV[first + (offer - 1) * width + 4])
    if costs[offer] == low and held < fewest then ties, fewest = {}, held end
    if costs[offer] == low and held == fewest then ties[#ties + 1] = offer end
  end
  chosen = ties[1 + math.floor(tonumber(ARGV[5]) * #ties)]
end

local at = first + (chosen - 1) * width
if request == '' then return {ARGV[at + 1], 0, 0} end
local expires = now_ms() + ARGV[2]
book(request, ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6]), expires,
  tonumber(ARGV[8]), ARGV[9], ARGV[10])
return {ARGV[at + 1], expires, 0}
