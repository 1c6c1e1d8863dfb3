// Puts new elements where others are, and keeps the old ones: their text and attributes change, and they stay. So a click meets what
// was pointed at, and focus and selection survive an event. Rows with a `data-key` stay with their key when others come before them.

export function settle(place, ...made) {
  const focused = document.activeElement;
  children(place, made.map((it) => (typeof it === "string" ? document.createTextNode(it) : it)));
  if (focused !== document.activeElement && focused !== null && focused.isConnected) focused.focus({ preventScroll: true });
}

const keyOf = (node) => node?.dataset?.key;

function children(place, made) {
  const wanted = new Set(made.map(keyOf));
  const kept = new Map();
  for (const old of [...place.children]) {
    if (keyOf(old) === undefined) continue;
    if (wanted.has(keyOf(old)) && !kept.has(keyOf(old))) kept.set(keyOf(old), old);
    else old.remove();
  }
  let next = place.firstChild;
  for (const fresh of made) {
    const key = keyOf(fresh);
    const old = key !== undefined ? (kept.get(key) ?? null) : next !== null && like(next, fresh) ? next : null;
    kept.delete(key);
    if (old === null) {
      place.insertBefore(fresh, next);
      continue;
    }
    if (old === next) next = next.nextSibling;
    else place.insertBefore(old, next);
    become(old, fresh);
  }
  while (next !== null) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
}

function like(old, fresh) {
  return old.nodeName === fresh.nodeName && keyOf(old) === undefined;
}

function become(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  children(old, [...fresh.childNodes]);
}
