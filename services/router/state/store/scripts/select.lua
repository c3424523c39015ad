-- ARGV: request id ("": no reservation), TTL in ms, prefill scale, temperature, random number in [0, 1), number of offers,
-- "*" if any worker is allowed, output, owner ("" for none), its lease in ms, "1" if offers have limits, "1" if they have
-- groups, the replica, priority and deadline of the request and the ms it has waited, numbers of the offers, then their
-- slots, then the allowed workers.
-- An offer's numbers are 5 doubles (uncached, added, held, prefill and decode to reserve), with limits 3 more (prefill,
-- decode and requests at which the slot accepts no more), with groups 1 more. The lowest group with a slot below its
-- limits is chosen from.
-- Returns {slot, expiry in Unix ms, 1 if it was reserved before}; the slot is "" if all are at their limits, or if there
-- are limits and the first request in another replica's queue precedes this one.
local request, scale, temperature = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local offers, first, limited, grouped, numbers = tonumber(ARGV[6]), 18, ARGV[11] == '1', ARGV[12] == '1', ARGV[17]
local width = 40 + (limited and 24 or 0) + (grouped and 8 or 0)

if request ~= '' then
  local packed = redis.call('HGET', RESERVATIONS, request)
  if packed then
    local held = cmsgpack.unpack(packed)
    local fits = ARGV[7] == '*'
    for at = first + offers, #ARGV do fits = fits or ARGV[at] == held.w end
    if held.x > now_ms() and fits then return {held.s, held.x, 1} end
    unbook(request, packed)
  end
end

if limited and is_preceded(ARGV[13], tonumber(ARGV[14]), tonumber(ARGV[15]), tonumber(ARGV[16])) then return {'', 0, 0} end

local last = first + offers - 1
local prefills = redis.call('HMGET', PREFILL, unpack(ARGV, first, last))
local decodes = redis.call('HMGET', DECODE, unpack(ARGV, first, last))
local counts = limited and redis.call('HMGET', REQUESTS, unpack(ARGV, first, last))
local costs, able, held, low, high, best = {}, {}, {}, math.huge, -math.huge, math.huge
for offer = 1, offers do
  local at = 1 + (offer - 1) * width
  local uncached, added, blocks = struct.unpack('<ddd', numbers, at)
  local prefill = tonumber(prefills[offer] or 0) / 1000
  local decode = tonumber(decodes[offer] or 0) / 1000
  local busy = false
  if limited then
    local most_prefill, most_decode, most_requests = struct.unpack('<ddd', numbers, at + 40)
    busy = prefill >= most_prefill or decode >= most_decode or tonumber(counts[offer] or 0) >= most_requests
  end
  local group = grouped and struct.unpack('<d', numbers, at + width - 8) or 0
  if not busy and group < best then
    costs, able, held, low, high, best = {}, {}, {}, math.huge, -math.huge, group
  end
  if not busy and group == best then
    local cost = scale * math.max(prefill + uncached, 0) + decode + added
    local count = #costs + 1
    costs[count], able[count], held[count] = cost, offer, blocks
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
    if costs[offer] == low then
      if held[offer] < fewest then ties, fewest = {}, held[offer] end
      if held[offer] == fewest then ties[#ties + 1] = offer end
    end
  end
  chosen = ties[1 + math.floor(tonumber(ARGV[5]) * #ties)]
end

local slot = ARGV[first + able[chosen] - 1]
if request == '' then return {slot, 0, 0} end
local prefill, decode = struct.unpack('<dd', numbers, 1 + (able[chosen] - 1) * width + 24)
local expires = now_ms() + ARGV[2]
redis.call('ZREM', ENDED, request) -- it was freed before and is retried
book(request, string.match(slot, '^(.*)/'), slot, prefill, decode, expires, tonumber(ARGV[8]), ARGV[9], ARGV[10])
return {slot, expires, 0}
