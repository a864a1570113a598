-- keep_worker_id: take or keep a worker's id for one start, unless a later start has it.
-- KEYS   1 worker ids: `<generation> <time of the last call> <worker>`  2 replaced starts: `<id> <worker>`, by time
-- ARGV   1 id  2 worker  3 generation ('': only return the next one)  4 ms to keep an id  5 ms to keep a replaced start
-- Reply  {'next', generation} | {'kept'} | {'taken', previous worker or ''} | {'replaced', worker} | {'unreadable', key}
local ids, replaced = KEYS[1], KEYS[2]
local id, worker, generation, keep, keep_replaced = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
if type(redis.pcall('HLEN', ids)) ~= 'number' then return { 'unreadable', ids } end
if type(redis.pcall('ZCARD', replaced)) ~= 'number' then return { 'unreadable', replaced } end

-- Other programs can write here: what cannot be read is nothing.
local function parse(text)
  local latest, at, owner = string.match(text or '', '^(%d+) (%d+) (.+)$')
  if latest and #latest <= 15 and #at <= 15 then return tonumber(latest), tonumber(at), owner end
  return 0, 0, ''
end

local now = now_ms()
local latest, _, owner = parse(redis.call('HGET', ids, id))
if not generation then return { 'next', format_integer(math.max(now, latest + 1)) } end

if latest > generation or (latest == generation and owner > worker) then
  redis.call('ZREMRANGEBYSCORE', replaced, '-inf', format_integer(now - keep_replaced))
  redis.call('ZADD', replaced, 'NX', format_integer(now), id .. ' ' .. worker)
  redis.call('PEXPIRE', replaced, keep_replaced)
  return { 'replaced', owner }
end

local is_new = owner ~= worker
if is_new then
  local rows = redis.call('HGETALL', ids)
  for i = 1, #rows, 2 do
    local _, at = parse(rows[i + 1])
    if at < now - keep then redis.call('HDEL', ids, rows[i]) end
  end
end
redis.call('HSET', ids, id, format_integer(generation) .. ' ' .. format_integer(now) .. ' ' .. worker)
redis.call('PEXPIRE', ids, keep)
return is_new and { 'taken', owner } or { 'kept' }
