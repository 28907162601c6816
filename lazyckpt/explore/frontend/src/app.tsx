// The frame of the application: what is shown, its problems, the pages, the state and the theme.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { About, Api, Problem, Side } from "./api";
import { Explorer, useLoaded, type Context } from "./context";
import { isTyping, KEYS } from "./keys";
import { PAGES } from "./pages";
import { arrival, formatRoute, sharedOf, type Route, type RouteStore } from "./route";
import { isGiven } from "./transport";
import { stepBeside } from "./steps";
import { hostTheme, keepTheme, keptTheme, onHostTheme, THEMES, type Theme } from "./theme";
import { FileTransport } from "./transport";
import { WidgetTransport } from "./widget";
import { PageLink } from "./parts/pagelink";
import { ReportNote } from "./parts/reportnote";
import { Dialog } from "./ui/dialog";
import { holdsStep, showStep, StepSwitch } from "./parts/steps";
import { Failure } from "./ui/failure";
import { bytes, count, counted, grouped, shownName, shownPlace } from "./ui/text";

const STEPS: Record<string, -1 | 1> = { ",": -1, ".": 1 }; // keys that go to another step of a run

export function App({ api, routes }: { api: Api; routes: RouteStore }) {
  const [route, setRoute] = useState(routes.read());
  useEffect(() => routes.listen(() => setRoute(routes.read())), [routes]);
  const step = route.params["step"];
  // a report may hold only what is true of the last step
  const asked = api.holds("about", { step }) ? { step } : {};
  const about = useLoaded((signal) => api.json<About>("about", asked, signal), [api, step]);
  const frame = useRef<HTMLDivElement>(null);
  const left = useRef(false); // whether the focus was in the page that was left
  const [theme, setTheme] = useState<Theme>(keptTheme);
  const [around, setAround] = useState(hostTheme);
  useEffect(() => onHostTheme(() => setAround(hostTheme())), []);
  const [printing, setPrinting] = useState(false); // on paper, which is light
  useEffect(() => {
    const [before, after] = [true, false].map((now) => () => setPrinting(now));
    addEventListener("beforeprint", before!);
    addEventListener("afterprint", after!);
    return () => {
      removeEventListener("beforeprint", before!);
      removeEventListener("afterprint", after!);
    };
  }, []);
  const [window_, setWindow] = useState<"help" | "problems" | null>(null);
  useLayoutEffect(() => {
    const root = frame.current?.closest<HTMLElement>(".lazyckpt-explorer");
    if (!root) return;
    const shown = printing ? "light" : theme === "auto" ? around : theme;
    if (shown) root.dataset["theme"] = shown;
    else delete root.dataset["theme"];
  });
  const were = useRef(new Map<string, Record<string, string>>()); // page -> its parameters when it was shown last
  const context = useMemo<Context | null>(() => {
    if (!about.value) return null;
    const target = (given: Record<string, string | undefined>, page: string): Route => {
      const bound = PAGES.find(({ id }) => id === page)?.bound ?? {};
      const all = page === route.page ? { ...route.params, ...given } : arrival(were.current.get(page), sharedOf(route.params), given, bound);
      const said = Object.entries(all).filter((pair): pair is [string, string] => isGiven(...pair));
      return { page, params: Object.fromEntries(said) };
    };
    return {
      api,
      about: about.value,
      route,
      theme: printing ? "light" : theme === "auto" ? around : theme,
      address: (given, page) => formatRoute(target(given, page)),
      go(given, page = route.page, replace = false) {
        left.current = !!frame.current?.querySelector("main")?.matches(":focus-within");
        routes.write(target(given, page), replace);
      },
    };
  }, [api, about.value, route, routes, theme, around, printing]);
  const pages = context ? PAGES.filter((page) => page.shown(context.about)) : [];
  const page = pages.find(({ id }) => id === route.page) ?? pages[0];
  useEffect(() => {
    if (context && frame.current?.closest("#explorer")) document.title = `${shownName(context.about.title)} · lazyckpt`;
  }, [context?.about.title]);
  useLayoutEffect(() => {
    if (page) were.current.set(page.id, route.params);
  }, [page?.id, route]);
  useLayoutEffect(() => {
    // the tab of the page is in view, where there is no room for all
    const nav = frame.current?.querySelector("nav");
    const tab = nav?.querySelector<HTMLElement>("[aria-current]");
    if (!nav || !tab) return;
    const over = tab.getBoundingClientRect().right - nav.getBoundingClientRect().right;
    const under = nav.getBoundingClientRect().left - tab.getBoundingClientRect().left;
    nav.scrollLeft += over > 0 ? over : under > 0 ? -under : 0;
  }, [page?.id]);
  useLayoutEffect(() => {
    // the focus stays in the explorer when what had it is gone
    const main = frame.current?.querySelector("main");
    if (left.current && main && !main.matches(":focus-within")) main.focus({ preventScroll: true });
    left.current = false;
  }, [page?.id]);
  const switchTheme = () => {
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!;
    keepTheme(next);
    setTheme(next);
  };
  const onKey = (event: KeyboardEvent) => {
    if (isTyping(event) || event.ctrlKey || event.metaKey || event.altKey || window_) return;
    const number = Number(event.key);
    const inTree = (event.target as Element).closest?.("[role=tree]"); // where letters go to names
    if (event.key === "?") setWindow("help");
    else if (event.key === "t" && !inTree) switchTheme();
    else if (event.key === "/") {
      event.preventDefault();
      const field = frame.current?.querySelector<HTMLInputElement>("input[type=search]");
      if (field) field.focus();
      else context?.go({}, "tree");
    } else if (context && STEPS[event.key] && context.about.kind === "run") {
      const next = stepBeside(context.about.steps, route.params["step"], STEPS[event.key]!);
      if (next !== undefined && holdsStep(context, next)) showStep(context, next);
    } else if (number >= 1 && pages[number - 1] && !inTree) context?.go({}, pages[number - 1]!.id);
  };
  useEffect(() => {
    // keys count within the explorer; a page of its own has nothing else, and then they count everywhere
    const root = frame.current?.closest(".lazyckpt-explorer");
    const target: EventTarget = root?.id === "explorer" || root?.parentElement === document.body ? document : (root ?? document);
    const listener = (event: Event) => onKey(event as KeyboardEvent);
    target.addEventListener("keydown", listener);
    return () => target.removeEventListener("keydown", listener);
  });
  const [silent, setSilent] = useState(false);
  useEffect(() => api.transport.onSilence?.(setSilent), [api]);
  const silence = silent && <Silence notebook={api.transport instanceof WidgetTransport} />;
  if (about.error) {
    const { step: _, ...rest } = route.params;
    return (
      <div class="frame" ref={frame}>
        <main>
          <Failure error={about.error} />
          {step !== undefined && (
            <button type="button" class="small" onClick={() => routes.write({ page: route.page, params: rest })}>
              Show the last step
            </button>
          )}
        </main>
      </div>
    );
  }
  if (!context || !page) {
    return (
      <div class="frame" ref={frame}>
        {silence || (
          <p class="quiet" role="status">
            Opening …
          </p>
        )}
      </div>
    );
  }
  const { title, kind, sides } = context.about;
  const side = sides[route.params["side"] === "b" ? 1 : 0] ?? sides[0]!;
  const problems = sides.flatMap((one) => one.problems);
  return (
    <Explorer.Provider value={context}>
      <div class="frame" ref={frame}>
        <header class="top">
          <div class="top-line">
            <h1 title={shownName(title, 2000)}>{sides.length > 1 ? shownName(tails(sides.map(({ place }) => place)).join(" and ")) : shownPlace(title)}</h1>
            <p class="top-facts">
              {kind === "checkpoint" ? side.format : kind} · {count(side.numel)} parameters · {bytes(side.nbytes)} ·{" "}
              {counted(side.tensors, "tensor")} in{" "}
              {counted(side.files, "file")}
            </p>
            <div class="top-tools">
              {problems.length > 0 && <ProblemButton problems={problems} sides={sides} onClick={() => setWindow("problems")} />}
              {sides.length > 1 && (
                <select
                  aria-label="checkpoint"
                  value={route.params["side"] ?? "a"}
                  onChange={(event) => context.go({ side: event.currentTarget.value === "b" ? "b" : undefined })}
                >
                  {tails(sides.map(({ place }) => place)).map((text, n) => (
                    <option key={n} value={"ab"[n]} title={shownName(sides[n]!.place)}>
                      {"AB"[n]}: {shownName(text, 40)}
                    </option>
                  ))}
                </select>
              )}
              {kind === "run" && <StepSwitch />}
              <StateSwitch side={side} context={context} />
              <button type="button" class="small" onClick={switchTheme} title="theme: as the system, light, dark (t)">
                {{ auto: "◐ auto", light: "○ light", dark: "● dark" }[theme]}
              </button>
              <button type="button" class="small" onClick={() => setWindow("help")} aria-label="keys and help" title="keys and help (?)">
                ?
              </button>
            </div>
          </div>
          <nav aria-label="Pages">
            {pages.map(({ id, title }) => (
              <PageLink key={id} page={id} current={id === page.id}>
                {title}
              </PageLink>
            ))}
          </nav>
        </header>
        {silence}
        <main tabIndex={-1}>
          <page.component key={page.id} />
        </main>
        {api.transport instanceof FileTransport && api.transport.report && <ReportNote {...api.transport.report} />}
        {window_ === "help" && <Help context={context} side={side} linked={!!frame.current?.closest("#explorer")} onClose={() => setWindow(null)} />}
        {window_ === "problems" && <Problems sides={sides} onClose={() => setWindow(null)} />}
      </div>
    </Explorer.Provider>
  );
}

/** Says that the kernel of a notebook, or the server, does not answer. */
function Silence({ notebook }: { notebook: boolean }) {
  return (
    <p class="silence" role="status">
      {notebook
        ? "The kernel does not answer. It may be busy with a cell: then this goes on by itself. If it was restarted, or there is none, run the cell again."
        : "The server does not answer. What is on screen stays; the page goes on by itself when the server answers again. If lazyckpt serve has ended, start it again and open the address that it prints."}
    </p>
  );
}

/** The ends of two paths, as long as tells them apart. */
function tails(places: string[]): string[] {
  const parts = places.map((place) => place.split("/").filter(Boolean));
  const most = Math.max(...parts.map((one) => one.length));
  for (let n = 1; n <= most; n += 1) {
    const found = parts.map((one) => one.slice(-n).join("/"));
    if (new Set(found).size === found.length) return found;
  }
  return places;
}

function StateSwitch({ side, context }: { side: Side; context: Context }) {
  if (side.states.length < 2) return null;
  return (
    <select
      aria-label="state"
      title="state: weights, or what the optimizer keeps for each weight"
      value={context.route.params["state"] ?? side.state}
      onChange={(event) => {
        const { value } = event.currentTarget;
        const { of } = context.route.params;
        // what the last step added is of no state
        context.go({ state: value === side.state ? undefined : value, of: of === "update" ? undefined : of });
      }}
    >
      {side.states.map(({ name, nbytes }) => (
        <option key={name} value={name}>
          {shownName(name)} ({bytes(nbytes)})
        </option>
      ))}
      <option value="stored">as stored</option>
    </select>
  );
}

function ProblemButton({ problems, sides, onClick }: { problems: Problem[]; sides: Side[]; onClick(): void }) {
  const all = sides.reduce((n, side) => n + side.problems_in_all, 0);
  const worst = (["error", "warning", "note"] as const).find((kind) => problems.some(({ severity }) => severity === kind))!;
  const noun = { error: "problem", warning: "problem", note: "note" }[worst];
  return (
    <button type="button" class={`problem-count ${worst}`} onClick={onClick}>
      {counted(all, noun)}
    </button>
  );
}

function Problems({ sides, onClose }: { sides: Side[]; onClose(): void }) {
  return (
    <Dialog title="Problems" onClose={onClose}>
      {sides.map((side, n) => (
        <section key={n}>
          {sides.length > 1 && <h3>{shownName(side.root)}</h3>}
          <ul class="problems">
            {side.problems.map((problem, m) => (
              <li key={m}>
                <strong class={problem.severity}>{problem.severity}</strong>
                {shownName(problem.text, 2000)} <code class="quiet">{problem.code}</code>
                {problem.advice && <span class="advice">{problem.advice}</span>}
              </li>
            ))}
          </ul>
          {side.problems_in_all > side.problems.length && (
            <p class="quiet">and {grouped(side.problems_in_all - side.problems.length)} more: view.problems lists all</p>
          )}
        </section>
      ))}
    </Dialog>
  );
}

function Help({ context, side, linked, onClose }: { context: Context; side: Side; linked: boolean; onClose(): void }) {
  return (
    <Dialog title="Help" onClose={onClose}>
      <dl class="keys">
        {KEYS.map(([key, what]) => [
          <dt key={key}>
            {key.split(" ").map((one, n) => (one === "…" ? " … " : <kbd key={n}>{one}</kbd>))}
          </dt>,
          <dd key={what}>{what}</dd>,
        ])}
      </dl>
      <p>{linked && "The address of the page is a link to what is on screen. "}Every picture and table can be saved.</p>
      <h3>This checkpoint</h3>
      <dl class="keys">
        {side.facts.map(([what, value]) => [<dt key={what}>{what}</dt>, <dd key={`=${what}`}>{shownName(value, 1000)}</dd>])}
      </dl>
      {!context.api.live && <p class="quiet">This is a report: it holds a part of the values. `lazyckpt serve` shows them all.</p>}
    </Dialog>
  );
}
