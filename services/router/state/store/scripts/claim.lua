-- ARGV: worker id, caller, digest of its lease key ("" for none), epoch (20 digits), proof, session, lease in ms. The tag
-- is the prefix. Returns false, or {remaining lease in ms, caller, proof} of another process that holds the id.
local key = claim_key(ARGV[1])
local held = redis.call('HMGET', key, 'caller', 'key', 'epoch', 'proof', 'session')
if held[1] and held[5] ~= ARGV[6] then
  local same = ARGV[3] ~= '' and held[1] == ARGV[2] and held[2] == ARGV[3]
  local own = ARGV[2] == 'worker/' .. ARGV[1] and (held[1] ~= ARGV[2] or ARGV[4] > held[3])
  if not same and not own then return {redis.call('PTTL', key), held[1], held[4]} end
end
redis.call('HSET', key, 'caller', ARGV[2], 'key', ARGV[3], 'epoch', ARGV[4], 'proof', ARGV[5], 'session', ARGV[6])
redis.call('PEXPIRE', key, ARGV[7])
return false
