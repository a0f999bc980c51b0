"""Optimizer state in host memory. The host steps the parameters while the device goes on.

=================  ==================================================  ================================================
what               does                                                with
=================  ==================================================  ================================================
``Offload``        says what the user chooses
``HostOptimizer``  queues a step, waits for it; has a ``Record`` of    ``DeviceStep`` and ``Tuning``: those that the
                   each parameter                                      device steps, and how many
``HostCopy``       is what the host keeps of a parameter: plain,       ``Stage``: how far a step has come;
                   ``LayerCopy``, ``MasterCopy``, ``InPlace``          ``GradientSnapshot``, ``Changed``: what has
                                                                       changed meanwhile
``HostStorage``    has the memory or the files that state lies in      ``_Ending``: how others wait for a step
``Executor``       runs the tasks of a step, a thread per resource     ``Task``, three for each ``ParameterStep``;
                                                                       ``TaskQueues``
``ForwardHooks``   let the next forward wait for what it uses          ``ActiveRowsHook``, ``_Hook``
``rescue``         saves what it can of a step that has failed         ``Record``: what was lost
=================  ==================================================  ================================================

The link to the device is :class:`grass.machine.link.Link`.
"""
