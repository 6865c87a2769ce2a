"""What is done inside the server: each change of the store is one Lua script, so that nobody sees half of it.

Keys, all behind ``{prefix}:`` (one hash tag: one slot of a cluster)::

    version, instance_key   of the schema; what signs callback URLs
    changed, changes        a counter of writes, and a stream of them for those who wait
    j:<id>                  hash, a job: r row, i input, x result, t tokens of its last writes, p provider's ids
    p:<dialect> <id>        ids of the jobs that have this provider's id, one a line
    open                    hash, group -> how many are open
    due:<dialect> <origin>  sorted set of open jobs by when they are due; a lease puts that off
    parties                 set of those that have one
    done:<group>            sorted set of ended jobs by when they ended (equal ones by id)
    groups                  set of those that have one
    number                  counter of deliveries
    d:<number>              hash, a delivery that was not applied yet: d delivery, b body, w who waits for it, m its name in `seen`
    seen                    sorted set, names of deliveries (16 bytes of a digest, v for verified or u) by when they came
    pending                 sorted set, numbers of those in d:, by when they came
    quarantine              sorted set, numbers of those that were not verified
    w:j:<id>, w:p:<...>     set of numbers that wait for this job, or for this provider's id
    ready, held             sorted sets, numbers whose job is here; those that are leased, by the end of it
    b:<hex>                 a body; what nobody refers to yet, or any more, goes by itself after an hour
    once:<token>            what came of a write, for a minute: asked again, it is said again
    migrating               who brings the store to a newer version
    repeats                 counter of writes that were known already

A script gets the prefix with its colon as the key, and as its first argument the version that its caller knows: whoever is
older, or finds the server emptied, writes nothing. Numbers are doubles on both sides; times go in as text that gives the same
double again, or out of the row.

A write whose answer was lost is sent again with the same token, and finds that it was done. Also what finds that writes
something (`repeats`): WAITAOF waits for what its own connection has written, and the caller has been promised that it waits.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BODY_KEPT_S", "OUTSIDE", "SCRIPTS"]

#: First byte of a reference to a body of its own key; any other begins with what :func:`spanwire.jobs.segments.inline` says.
OUTSIDE: Final = b"\x02"
#: How long a body is kept that no row refers to, in seconds. What refers to it comes moments later.
BODY_KEPT_S: Final = 3600
#: How long a batch of deliveries is known by its token, in seconds: longer than anybody tries again.
_ONCE_S = 60
#: Tokens of a job's last writes, and bytes of one.
_TOKENS, _TOKEN_BYTES = 8, 8

_PRELUDE = """
local p = KEYS[1]
local call = redis.call
local version = call('GET', p .. 'version')
if not version then return redis.error_reply('SPANWIREEMPTY the store is empty') end
if version ~= ARGV[1] then return redis.error_reply('SPANWIREVERSION ' .. version) end

local OPEN = {created=true, submitting=true, submit_unknown=true, submitted=true, queued=true, running=true}

-- What scripts need of a row. Fields that have their default are not in it.
local function head(blob)
  local row = cmsgpack.unpack(blob)
  row.state, row.attempt, row.group = row.state or 'created', row.attempt or 1, row.group or ''
  row.open = OPEN[row.state] or false
  local due, poll = row.due_s or 0, row.poll_s or 0
  if due > 0 and poll > 0 then row.next = math.min(due, poll)
  elseif due > 0 then row.next = due
  elseif poll > 0 then row.next = poll end
  row.party = (row.dialect or '') .. ' ' .. (row.origin or '')
  return row
end

-- Take a job from where it was (nil: nowhere) to where it belongs now.
local function move(id, old, new)
  local was = old and old.open and old.next and old.party
  local is = new and new.open and new.next and new.party
  if was and was ~= is then
    call('ZREM', p .. 'due:' .. was, id)
    if call('EXISTS', p .. 'due:' .. was) == 0 then call('SREM', p .. 'parties', was) end
  end
  if is then
    call('ZADD', p .. 'due:' .. is, new.next, id)
    if was ~= is then call('SADD', p .. 'parties', is) end
  end
  was, is = old and not old.open and old.group, new and not new.open and new.group
  if was and was ~= is then
    call('ZREM', p .. 'done:' .. was, id)
    if call('EXISTS', p .. 'done:' .. was) == 0 then call('SREM', p .. 'groups', was) end
  end
  if is then
    call('ZADD', p .. 'done:' .. is, new.resolved_s or 0, id)
    if was ~= is then call('SADD', p .. 'groups', is) end
  end
  was, is = old and old.open and old.group, new and new.open and new.group
  if was ~= is then
    if was and call('HINCRBY', p .. 'open', was, -1) <= 0 then call('HDEL', p .. 'open', was) end
    if is then call('HINCRBY', p .. 'open', is, 1) end
  end
end

-- A body of its own key.
local function body(reference)
  if reference and string.byte(reference) == 2 then return p .. 'b:' .. string.sub(reference, 2) end
end
-- The server may have refused a body, for want of memory, and take the script that comes after it.
local function gone(reference)
  local key = body(reference)
  return key and call('EXISTS', key) == 0
end
local function refuse() return redis.error_reply('SPANWIREBODY a body is not there') end
local function keep(reference)
  local key = body(reference)
  if key then call('PERSIST', key) end
end
local function drop(reference)
  local key = body(reference)
  if key then call('UNLINK', key) end
end

-- Deliveries that waited for this have their job now, or have lost it.
local function arrived(key)
  for _, n in ipairs(call('SMEMBERS', p .. 'w:' .. key)) do
    if not call('ZSCORE', p .. 'held', n) then call('ZADD', p .. 'ready', n, n) end
  end
end
local function left(key)
  for _, n in ipairs(call('SMEMBERS', p .. 'w:' .. key)) do
    call('ZREM', p .. 'ready', n)
    call('ZREM', p .. 'held', n)
  end
end
local function await(n, key)
  if key == '' then return end
  call('SADD', p .. 'w:' .. key, n)
  if call('EXISTS', p .. key) == 1 then call('ZADD', p .. 'ready', n, n) end
end

-- Make a job known by the provider's id of it. Those of earlier attempts stay.
local function name(id, row)
  if not row.provider_id then return end
  local key = 'p:' .. (row.dialect or '') .. ' ' .. row.provider_id
  local known = call('HGET', p .. 'j:' .. id, 'p')
  known = known and cmsgpack.unpack(known) or {}
  for _, one in ipairs(known) do if one == key then return end end
  known[#known + 1] = key
  call('HSET', p .. 'j:' .. id, 'p', cmsgpack.pack(known))
  local ids = call('GET', p .. key)
  call('SET', p .. key, ids and (ids .. '\\n' .. id) or id)
  arrived(key)
end

-- The delivery is done with; that it was seen is remembered.
local function forget(n)
  local found = call('HMGET', p .. 'd:' .. n, 'w', 'b')
  if found[1] then
    if found[1] ~= '' then call('SREM', p .. 'w:' .. found[1], n) end
    drop(found[2])
    call('UNLINK', p .. 'd:' .. n)
  end
  for _, set in ipairs({'pending', 'ready', 'held', 'quarantine'}) do call('ZREM', p .. set, n) end
end

local function signal()
  call('XADD', p .. 'changes', 'MAXLEN', '~', 100, '*', 'n', call('INCR', p .. 'changed'))
end
local function again() call('INCR', p .. 'repeats') end
"""

# version, token, then for each job: id, row, reference of its input, of its result ('' for none).
_ADD = """
local token = ARGV[2]
local new = {}
for at = 3, #ARGV, 4 do
  local id = ARGV[at]
  local tokens = call('HGET', p .. 'j:' .. id, 't')
  if tokens then
    if string.sub(tokens, 1, #token) ~= token then return 0 end
    again()
    return 1
  end
  if new[id] then return 0 end
  if gone(ARGV[at + 2]) or gone(ARGV[at + 3]) then return refuse() end
  new[id] = true
end
for at = 3, #ARGV, 4 do
  local id, input, result = ARGV[at], ARGV[at + 2], ARGV[at + 3]
  local row = head(ARGV[at + 1])
  call('HSET', p .. 'j:' .. id, 'r', ARGV[at + 1], 't', token)
  if input ~= '' then call('HSET', p .. 'j:' .. id, 'i', input) keep(input) end
  if result ~= '' then call('HSET', p .. 'j:' .. id, 'x', result) keep(result) end
  move(id, nil, row)
  arrived('j:' .. id)
  name(id, row)
end
signal()
return 1
"""

# version, token, id, the state and attempt that it must have, row, reference of the result, what of the input: 'drop', 'keep',
# or a reference, and the revision that it must have. 1: done; 0: it is another; 2: there is no input to keep.
_SWAP = f"""
local token, id, input = ARGV[2], ARGV[3], ARGV[8]
local job = p .. 'j:' .. id
local found = call('HMGET', job, 'r', 'i', 'x', 't')
if not found[1] then return 0 end
if string.find(found[4], token, 1, true) then again() return 1 end
local old = head(found[1])
if old.state ~= ARGV[4] or old.attempt ~= tonumber(ARGV[5]) then return 0 end
if (old.revision or 0) ~= tonumber(ARGV[9]) then return 0 end
if input == 'keep' and not found[2] then return 2 end
if gone(input) or (ARGV[7] ~= (found[3] or '') and gone(ARGV[7])) then return refuse() end
local new = head(ARGV[6])
local tokens = found[4] .. token -- the first is that of `add`; then the last ones
if #tokens > {_TOKENS * _TOKEN_BYTES} then
  tokens = string.sub(tokens, 1, {_TOKEN_BYTES}) .. string.sub(tokens, {2 * _TOKEN_BYTES + 1})
end
call('HSET', job, 'r', ARGV[6], 't', tokens)
if input == 'drop' then
  if found[2] then call('HDEL', job, 'i') drop(found[2]) end
elseif input ~= 'keep' then
  call('HSET', job, 'i', input)
  keep(input)
end
local result = ARGV[7]
if result ~= (found[3] or '') then
  local before = body(found[3])
  if before then call('EXPIRE', before, {BODY_KEPT_S}) end -- somebody may be about to read it
  if result == '' then call('HDEL', job, 'x') else call('HSET', job, 'x', result) keep(result) end
end
move(id, old, new)
name(id, new)
signal()
return 1
"""

# version, token, then for each delivery: digest, '1' if it was verified, when it came, who waits for it, delivery, reference of
# its body. Gives '1' for each that is new and '0' for others.
_RECEIVE = f"""
local token = p .. 'once:' .. ARGV[2]
local done = call('GET', token)
if done then again() return done end
for at = 3, #ARGV, 6 do if gone(ARGV[at + 5]) then return refuse() end end
local fresh, any = {{}}, false
for at = 3, #ARGV, 6 do
  local digest, verified, came, who = ARGV[at], ARGV[at + 1] == '1', ARGV[at + 2], ARGV[at + 3]
  if call('ZSCORE', p .. 'seen', digest .. 'v') or (not verified and call('ZSCORE', p .. 'seen', digest .. 'u')) then
    fresh[#fresh + 1] = '0'
    drop(ARGV[at + 5])
  else
    fresh[#fresh + 1], any = '1', true
    local n, known = call('INCR', p .. 'number'), digest .. (verified and 'v' or 'u')
    call('ZADD', p .. 'seen', came, known)
    call('HSET', p .. 'd:' .. n, 'd', ARGV[at + 4], 'b', ARGV[at + 5], 'w', who, 'm', known)
    call('ZADD', p .. 'pending', came, n)
    keep(ARGV[at + 5])
    if verified then await(n, who) else call('ZADD', p .. 'quarantine', n, n) end
  end
end
fresh = table.concat(fresh)
call('SET', token, fresh, 'EX', {_ONCE_S})
if any then signal() end
return fresh
"""

# version, numbers.
_APPLIED = """
for at = 2, #ARGV do
  if not call('ZSCORE', p .. 'quarantine', ARGV[at]) then forget(ARGV[at]) end
end
call('INCR', p .. 'changed') -- nobody waits for this
return 1
"""

# version, number.
_VERIFIED = """
local n = ARGV[2]
if not call('ZSCORE', p .. 'quarantine', n) then return 0 end
local found = call('HMGET', p .. 'd:' .. n, 'm', 'w')
local digest = string.sub(found[1], 1, -2)
local came = call('ZSCORE', p .. 'seen', found[1]) or call('ZSCORE', p .. 'pending', n)
call('ZREM', p .. 'seen', found[1])
if call('ZSCORE', p .. 'seen', digest .. 'v') then
  forget(n)
else
  call('ZADD', p .. 'seen', came, digest .. 'v')
  call('ZREM', p .. 'quarantine', n)
  call('HSET', p .. 'd:' .. n, 'm', digest .. 'v')
  await(n, found[2])
end
signal()
return 1
"""

# version, how many, for how long in milliseconds. Gives numbers.
_LEASE_DELIVERIES = """
local time = call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
for _, n in ipairs(call('ZRANGEBYSCORE', p .. 'held', '-inf', now_ms, 'LIMIT', 0, ARGV[2])) do
  call('ZREM', p .. 'held', n)
  call('ZADD', p .. 'ready', n, n)
end
local some = call('ZRANGE', p .. 'ready', 0, ARGV[2] - 1)
for _, n in ipairs(some) do
  call('ZREM', p .. 'ready', n)
  call('ZADD', p .. 'held', now_ms + ARGV[3], n)
end
return some
"""

# version, now, how many, until when they are leased ('' for not at all), whether parties follow or all are meant ('1', '0'),
# parties. Gives ids.
_DUE = """
local limit, parties = tonumber(ARGV[3]), {}
if ARGV[5] == '0' then parties = call('SMEMBERS', p .. 'parties') end
for at = 6, #ARGV do parties[#parties + 1] = ARGV[at] end
local some = {}
for _, party in ipairs(parties) do
  local key = p .. 'due:' .. party
  local found = call('ZRANGEBYSCORE', key, '-inf', ARGV[2], 'WITHSCORES', 'LIMIT', 0, limit)
  for at = 1, #found, 2 do some[#some + 1] = {found[at], tonumber(found[at + 1]), key} end
end
if #parties > 1 then
  table.sort(some, function(a, b) return a[2] < b[2] or (a[2] == b[2] and a[1] < b[1]) end)
end
local ids = {}
for at = 1, math.min(limit, #some) do
  ids[at] = some[at][1]
  if ARGV[4] ~= '' then call('ZADD', some[at][3], ARGV[4], ids[at]) end
end
return ids
"""

# version, group, those that ended before, how many. Gives how many went.
_SWEEP_JOBS = """
local ids = call('ZRANGEBYSCORE', p .. 'done:' .. ARGV[2], '-inf', '(' .. ARGV[3], 'LIMIT', 0, ARGV[4])
for _, id in ipairs(ids) do
  local found = call('HMGET', p .. 'j:' .. id, 'r', 'i', 'x', 'p')
  if found[1] then
    drop(found[2])
    drop(found[3])
    move(id, head(found[1]), nil)
    for _, key in ipairs(found[4] and cmsgpack.unpack(found[4]) or {}) do
      local others = {}
      for one in string.gmatch(call('GET', p .. key) or '', '[^\\n]+') do
        if one ~= id then others[#others + 1] = one end
      end
      if #others > 0 then call('SET', p .. key, table.concat(others, '\\n')) else call('DEL', p .. key) left(key) end
    end
    left('j:' .. id)
    call('UNLINK', p .. 'j:' .. id)
  end
  call('ZREM', p .. 'done:' .. ARGV[2], id)
end
if #ids > 0 then signal() end
return #ids
"""

# version, those that came before, how many. Gives how many went, and how many bodies of them.
_SWEEP_DELIVERIES = """
local waiting = call('ZRANGEBYSCORE', p .. 'pending', '-inf', '(' .. ARGV[2], 'LIMIT', 0, ARGV[3])
for _, n in ipairs(waiting) do forget(n) end
local seen = call('ZRANGEBYSCORE', p .. 'seen', '-inf', '(' .. ARGV[2], 'LIMIT', 0, ARGV[3])
for _, name in ipairs(seen) do call('ZREM', p .. 'seen', name) end
if #seen + #waiting > 0 then signal() end
return {#seen, #waiting}
"""

# version, key: make the store, if it is not there. Gives what is there.
_MAKE = """
local p, call = KEYS[1], redis.call
if call('SETNX', p .. 'version', ARGV[1]) == 1 then call('INCR', p .. 'changed') else call('INCR', p .. 'repeats') end
call('SETNX', p .. 'instance_key', ARGV[2])
return {call('GET', p .. 'version'), call('GET', p .. 'instance_key')}
"""

# version before, version after, who migrates: one step is done. 0: it was somebody else's turn.
_MIGRATED = """
local p, call = KEYS[1], redis.call
if call('GET', p .. 'version') ~= ARGV[1] or call('GET', p .. 'migrating') ~= ARGV[3] then return 0 end
call('SET', p .. 'version', ARGV[2])
call('DEL', p .. 'migrating')
return 1
"""

SCRIPTS: Final[dict[str, str]] = {
    "add": _PRELUDE + _ADD,
    "swap": _PRELUDE + _SWAP,
    "receive": _PRELUDE + _RECEIVE,
    "applied": _PRELUDE + _APPLIED,
    "verified": _PRELUDE + _VERIFIED,
    "lease_deliveries": _PRELUDE + _LEASE_DELIVERIES,
    "due": _PRELUDE + _DUE,
    "sweep_jobs": _PRELUDE + _SWEEP_JOBS,
    "sweep_deliveries": _PRELUDE + _SWEEP_DELIVERIES,
    "make": _MAKE,
    "migrated": _MIGRATED,
}
