-- ARGV: ids of requests whose prompts are computed. Returns those without reservations.
local unknown = {}
for _, request in ipairs(ARGV) do
  local packed = redis.call('HGET', RESERVATIONS, request)
  if packed then
    local held = cmsgpack.unpack(packed)
    if held.p ~= 0 then
      redis.call('HINCRBY', PREFILL, held.s, 0 - held.p)
      held.p = 0
      redis.call('HSET', RESERVATIONS, request, cmsgpack.pack(held))
    end
  else
    unknown[#unknown + 1] = request
  end
end
return unknown
