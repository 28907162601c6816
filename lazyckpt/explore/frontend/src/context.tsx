// What every component may ask for: the API, what is shown, and the route.

import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";
import type { About, Api } from "./api";
import type { Route } from "./route";

export interface Context {
  api: Api;
  about: About;
  route: Route;
  /** The theme that is chosen here or by the notebook; undefined for the system's. */
  theme?: "light" | "dark";
  /** Changes parameters of the route, and the page if one is named; undefined removes a parameter. */
  go(params: Record<string, string | undefined>, page?: string, replace?: boolean): void;
  /** The address to which `go` goes. */
  address(params: Record<string, string | undefined>, page: string): string;
}

export const Explorer = createContext<Context | null>(null);

export function useExplorer(): Context {
  const found = useContext(Explorer);
  if (!found) throw new Error("outside of the explorer");
  return found;
}

/** The value of a parameter of the link, and a function that changes it; `first` is the value without the parameter. */
export function useParam(name: string, first: string): [string, (value: string) => void] {
  const { route, go } = useExplorer();
  return [route.params[name] ?? first, (value) => go({ [name]: value === first ? undefined : value }, undefined, true)];
}

export type Loaded<T> = { value?: T; error?: Error; loading: boolean };

/** Loads something anew when a dependency changes; a request whose answer is no longer wanted is cancelled. */
export function useLoaded<T>(load: (signal: AbortSignal) => Promise<T>, dependencies: unknown[]): Loaded<T> {
  const [state, setState] = useState<Loaded<T>>({ loading: true });
  useEffect(() => {
    const controller = new AbortController();
    setState((old) => (old.error ? { loading: true } : { ...old, loading: true }));
    load(controller.signal).then(
      (value) => controller.signal.aborted || setState({ value, loading: false }),
      (error: Error) => controller.signal.aborted || setState({ error, loading: false }),
    );
    return () => controller.abort();
  }, dependencies);
  return state;
}
