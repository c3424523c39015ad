-- ARGV: pairs of request id and total output in thousandths of a block. Returns the ids without reservations.
local unknown = {}
for at = 1, #ARGV, 2 do
  local packed = redis.call('HGET', RESERVATIONS, ARGV[at])
  if packed then
    local held = cmsgpack.unpack(packed)
    local growth = tonumber(ARGV[at + 1]) - held.u
    if growth > 0 then
      redis.call('HINCRBY', DECODE, held.s, growth)
      held.d = held.d + growth
      held.u = held.u + growth
      redis.call('HSET', RESERVATIONS, ARGV[at], cmsgpack.pack(held))
    end
  else
    unknown[#unknown + 1] = ARGV[at]
  end
end
return unknown
