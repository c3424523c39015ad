-- ARGV: worker id, rank. Returns {epoch, sequence, packed hashes of each tier}, or false.
local known = redis.call('HMGET', worker_key(ARGV[1]), 'epoch', 'seq:' .. ARGV[2])
if not known[1] then return false end
local answer = {known[1], tonumber(known[2] or 0)}
for tier = 0, 2 do
  answer[#answer + 1] = table.concat(redis.call('SMEMBERS', blocks_key(ARGV[1], known[1], ARGV[2], tier)))
end
return answer
