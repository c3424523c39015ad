-- ARGV: worker id, slot, maximum requests, minimum age of a reservation in ms, "1" if no prompt waits for computation.
-- Of the reservations of that age, releases the oldest beyond the maximum, and the prefill load of the others if no
-- prompt waits. Returns {reservations released, prompts found computed}.
local before, most, marked = now_ms() - ARGV[4], tonumber(ARGV[3]), 0
local old = {}
for _, request in ipairs(redis.call('SMEMBERS', booked_key(ARGV[1]))) do
  local packed = redis.call('HGET', RESERVATIONS, request)
  local held = packed and cmsgpack.unpack(packed)
  if held and held.s == ARGV[2] and held.b <= before then old[#old + 1] = {request, packed, held} end
end
table.sort(old, function(a, b) return a[3].b < b[3].b end)
local surplus = math.max(#old - most, 0)
for at, each in ipairs(old) do
  local held = each[3]
  if at <= surplus then
    unbook(each[1], each[2])
  elseif ARGV[5] == '1' and held.p ~= 0 then
    redis.call('HINCRBY', PREFILL, held.s, 0 - held.p)
    held.p = 0
    redis.call('HSET', RESERVATIONS, each[1], cmsgpack.pack(held))
    marked = marked + 1
  end
end
return {surplus, marked}
