// Signing in: the token is sent once, and a cookie that scripts cannot read takes its place.

import { signIn } from "./api.js";
import { byId, say } from "./dom.js";

/** Where to go afterwards: a path of this service, never another site. */
function target() {
  const next = new URLSearchParams(location.search).get("next") ?? "/";
  if (!next.startsWith("/") || !URL.canParse(next, location.origin)) return "/";
  const place = new URL(next, location.origin);
  return place.origin === location.origin && place.pathname !== "/signin" ? place.pathname + place.search : "/";
}

byId("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = byId("enter");
  const problem = byId("problem");
  button.disabled = true;
  problem.hidden = true;
  try {
    await signIn(byId("token").value.trim());
    location.assign(target());
  } catch (error) {
    say(problem, error.status === 401 ? "This token is not known here. The file token in POLLUX_HOME has the right one." : error.message);
    problem.hidden = false;
    button.disabled = false;
    byId("token").select();
  }
});
byId("token").focus();
