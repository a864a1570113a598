-- register_queue: add a queue to the set of queues. Its owner is the first tenant that has fewer queues than the limit.
-- KEYS   1 set of queues  2 owners: `queue:<name>` and its tenant, `tenant:<name>` and its number of queues
-- ARGV   1 queue  2 limit ('': none, because the queue was registered before)  then tenants ('': no owner)
-- Reply  1 if it is new, else 0 | 'limited'
local owners, field = KEYS[2], 'queue:' .. ARGV[1]
local known, owner, count = redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1, nil, nil
if ARGV[3] and redis.call('HEXISTS', owners, field) == 0 then
  local limit = not known and tonumber(ARGV[2])
  for index = 3, #ARGV do
    count = tonumber(redis.call('HGET', owners, 'tenant:' .. ARGV[index]) or 0) or 0
    if not limit or count < limit then
      owner = ARGV[index]
      break
    end
  end
  if not owner then return 'limited' end
end
-- SREM comes first: a full Redis allows it, and then the rest of the script.
redis.call('SREM', KEYS[1], '')
if owner then redis.call('HSET', owners, field, owner, 'tenant:' .. owner, string.format('%.0f', count + 1)) end
return redis.call('SADD', KEYS[1], ARGV[1])
