// Talking to the service: JSON in and out, one shape of errors, the session's cookie and its CSRF value.

let csrf = "";
let leaving = false;

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function call(method, path, body) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (method !== "GET" && csrf) headers["X-Pollux-CSRF"] = csrf;
  let answer;
  try {
    answer = await fetch(path, { method, headers, credentials: "same-origin", cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new ApiError(0, "Unreachable", "the service does not answer; it may be restarting");
  }
  const text = await answer.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    throw new ApiError(answer.status, "Unreadable", `the answer to ${path} is not JSON (status ${answer.status})`);
  }
  if (answer.ok) return value;
  const error = value?.error ?? {};
  throw new ApiError(answer.status, error.code ?? "Error", error.message ?? `status ${answer.status}`);
}

/** GET; without a session, goes to the page for signing in, and back. */
export async function get(path) {
  try {
    return await call("GET", path);
  } catch (error) {
    if (error.status === 401) leave();
    throw error;
  }
}

/** A page of the list of jobs; each has `why`, the words of `pollux explain` about it and the jobs that they name. */
export async function getJobs(path) {
  const page = await get(path);
  for (const job of page.jobs) job.why = page.explanations?.[job.id] ?? { text: "", jobs: [] };
  return page;
}

/** POST, PUT or DELETE with the session's CSRF value. */
export async function send(method, path, body) {
  try {
    return await call(method, path, body);
  } catch (error) {
    if (error.status === 401) leave();
    throw error;
  }
}

export async function signIn(token) {
  const session = await call("POST", "/v1/session", { token });
  csrf = session.csrf;
  return session;
}

/** The person at the page: {role, csrf}. */
export async function session() {
  const found = await get("/v1/session");
  csrf = found.csrf;
  return found;
}

export async function signOut() {
  // Pending requests will be refused: they must not lead to the page for signing in.
  leaving = true;
  try {
    await call("DELETE", "/v1/session");
  } finally {
    location.assign("/signin");
  }
}

/** To the page for signing in, once, and back here afterwards. */
export function leave() {
  if (leaving) return;
  leaving = true;
  location.assign(`/signin?next=${encodeURIComponent(location.pathname + location.search)}`);
}

export const jobPath = (id) => `/v1/jobs/${encodeURIComponent(id)}`;
export const jobPage = (id) => `/jobs/${encodeURIComponent(id)}`;
