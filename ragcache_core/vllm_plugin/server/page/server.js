// What the page asks its server, with the key that it was given, which stays in this tab.

const NAME = "ragcache-key";
const TIMEOUT_MS = 10_000;

export class Refused extends Error {}
export class NotForTenants extends Error {}

export const key = {
  read: () => sessionStorage.getItem(NAME),
  keep: (value) => sessionStorage.setItem(NAME, value),
  forget: () => sessionStorage.removeItem(NAME),
};

// Return what a route answers. Throws Refused where the key is missing or wrong, NotForTenants where a tenant's key does
// not open the route, and Error for all else.
export async function ask(path) {
  const said = key.read();
  const headers = said === null ? {} : { Authorization: `Bearer ${said}` };
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.ok) return answer.json();
  const why = await reason(answer);
  if (answer.status === 401) throw new Refused(said === null ? "" : "The server rejects this key.");
  if (answer.status === 403) throw new NotForTenants(why);
  throw new Error(why);
}

async function reason(answer) {
  try {
    const body = await answer.json();
    return String(body.error?.message ?? body.detail ?? body.error);
  } catch {
    return `it answers with status ${answer.status}`;
  }
}
