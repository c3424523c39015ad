-- ARGV: ids of ended requests. Returns those without reservations.
local unknown = {}
for _, request in ipairs(ARGV) do
  local packed = redis.call('HGET', RESERVATIONS, request)
  if packed then unbook(request, packed) else unknown[#unknown + 1] = request end
end
return unknown
