// The frame of the application: what is shown, the pages, the theme.

import { useEffect, useMemo, useState } from "preact/hooks";
import type { About, Api } from "./api";
import { Explorer, linkTo, useLoaded, type Context } from "./context";
import { PAGES } from "./pages";
import type { RouteStore } from "./route";
import { Failure } from "./ui/failure";
import { bytes, count, grouped, shownName } from "./ui/text";

export function App({ api, routes }: { api: Api; routes: RouteStore }) {
  const [route, setRoute] = useState(routes.read());
  useEffect(() => routes.listen(() => setRoute(routes.read())), [routes]);
  const step = route.params["step"];
  const about = useLoaded((signal) => api.json<About>("about", { step }, signal), [api, step]);
  const context = useMemo<Context | null>(
    () =>
      about.value
        ? {
            api,
            about: about.value,
            route,
            go(params, page = route.page, replace = false) {
              const merged = { ...(page === route.page ? route.params : {}), ...params };
              const given = Object.entries(merged).filter((pair): pair is [string, string] => !!pair[1]);
              routes.write({ page, params: Object.fromEntries(given) }, replace);
            },
          }
        : null,
    [api, about.value, route, routes],
  );
  if (about.error) return <Failure error={about.error} />;
  if (!context) return <p class="quiet">Opening …</p>;
  const pages = PAGES.filter((page) => page.shown(context.about));
  const page = pages.find(({ id }) => id === route.page) ?? pages[0]!;
  const { title, kind, sides } = context.about;
  const side = sides[0]!;
  return (
    <Explorer.Provider value={context}>
      <header class="top">
        <h1>{shownName(title)}</h1>
        <p class="quiet">
          {kind === "checkpoint" ? side.format : kind} · {count(side.numel)} parameters · {bytes(side.nbytes)} ·{" "}
          {grouped(side.tensors)} tensors in {grouped(side.files)} files
        </p>
        <nav aria-label="Pages">
          {pages.map(({ id, title }) => (
            <a href={linkTo(id, {})} aria-current={id === page.id ? "page" : undefined} onClick={(event) => {
                event.preventDefault();
                context.go({}, id);
              }}>
              {title}
            </a>
          ))}
        </nav>
      </header>
      <main>
        <page.component key={page.id} />
      </main>
    </Explorer.Provider>
  );
}
