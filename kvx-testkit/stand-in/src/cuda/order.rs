//! Streams and events.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use super::context::current;
use crate::argument::{Out, answer};
use crate::event::{EVENTS, Event};
use crate::handles::Handle;
use crate::stream;

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(created: Out<Handle>, _flags: c_uint) -> c_int {
    answer("cuStreamCreate", || created.set(stream::create(current()?)?))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(handle: Handle) -> c_int {
    answer("cuStreamDestroy_v2", || stream::destroy(handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(handle: Handle) -> c_int {
    answer("cuStreamQuery", || stream::of(handle, current()?)?.query())
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(handle: Handle) -> c_int {
    answer("cuStreamSynchronize", || {
        let device = current()?;
        stream::of(handle, device)?.wait();
        device.works()
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(handle: Handle, event: Handle, _flags: c_uint) -> c_int {
    answer("cuStreamWaitEvent", || {
        let event = EVENTS.get(event)?;
        let stream = stream::of(handle, current()?)?;
        stream.push(Box::new(move || {
            event.wait();
            Ok(())
        }));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventCreate(created: Out<Handle>, _flags: c_uint) -> c_int {
    answer("cuEventCreate", || {
        current()?;
        created.set(EVENTS.add(Arc::new(Event::default())))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(handle: Handle) -> c_int {
    answer("cuEventDestroy_v2", || EVENTS.remove(handle).map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: Handle, handle: Handle) -> c_int {
    answer("cuEventRecord", || {
        let stream = stream::of(handle, current()?)?;
        EVENTS.get(event)?.record(&stream);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: Handle) -> c_int {
    answer("cuEventQuery", || {
        let device = current()?;
        let event = EVENTS.get(event)?;
        event.query()?;
        // What came before it may have broken the device since.
        device.works()
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: Handle) -> c_int {
    answer("cuEventSynchronize", || {
        let device = current()?;
        EVENTS.get(event)?.wait();
        device.works()
    })
}
