-- ARGV: request id, worker id, slot, prefill, decode, expiry in Unix ms, output, owner ("" for none), its lease in ms.
-- Does nothing if the request has ended lately, or has a reservation on this slot, or one elsewhere that expires later.
if tonumber(redis.call('ZSCORE', ENDED, ARGV[1]) or 0) > now_ms() - ENDED_FOR_MS then return 0 end
local packed = redis.call('HGET', RESERVATIONS, ARGV[1])
if packed then
  local held = cmsgpack.unpack(packed)
  if held.s == ARGV[3] or held.x >= tonumber(ARGV[6]) then return 0 end
  unbook(ARGV[1], packed)
end
book(ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]),
  tonumber(ARGV[7]), ARGV[8], ARGV[9])
return 1
